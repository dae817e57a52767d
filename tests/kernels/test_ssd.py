"""The SSD's kernels beside the reference backend in float64, at odd sizes and at the edges; what they promise to torch."""

import pytest
import torch
from compare import assert_like, assert_like_reference, assert_same_bits, evaluate
from torch._subclasses.fake_tensor import FakeTensorMode

from config.model_config import ModelConfig
from mamba_fsdp.model.init import initial_value
from mamba_fsdp.model.lm import MambaLM
from mamba_fsdp.model.spec import parameters
from mamba_fsdp.ops.backends import REFERENCE
from mamba_fsdp.ops.ssd import ssd
from mamba_fsdp.ops.ssd.triton import GRADIENTS, SWEEP

MOST = {
    torch.float32: 1e-6,
    torch.bfloat16: 2.0**-6,
    torch.float16: 2.0**-9,
}  # of sums over whole rows, as dA is
ACTIVATIONS = ("x", "dt", "B", "C")


def leaves(length=40, dtype=torch.float32, batch=1, heads=2, headdim=18, groups=1, d_state=17):
    generator = torch.Generator().manual_seed(length + headdim)
    randn = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
    values = dict(
        x=randn(batch, length, heads, headdim),
        dt=randn(batch, length, heads) - 1,
        A=-torch.exp(randn(heads)),
        B=randn(batch, length, groups, d_state),
        C=randn(batch, length, groups, d_state),
        D=randn(heads),
        dt_bias=randn(heads),
        initial_state=randn(batch, heads, headdim, d_state),
    )
    return {
        name: value.to(dtype if name in ACTIVATIONS else torch.float32)
        for name, value in values.items()
    }


def random_documents(length, batch=1):
    return (
        (torch.rand(batch, length, generator=torch.Generator().manual_seed(1)) < 4 / length)
        .int()
        .cumsum(1)
    )


def ours(**values):
    return ssd(**values, chunk_size=64, return_last_state=True, backend="triton")


def reference(**values):
    return ssd(**values, chunk_size=64, return_last_state=True)


@pytest.mark.parametrize("bounded", [False, True], ids=["one document", "seq_idx"])
@pytest.mark.parametrize(
    "sizes",
    [
        dict(length=70, batch=2, heads=4, groups=2),
        dict(length=1),
        dict(length=64, headdim=64, d_state=128),
        dict(length=33, headdim=80, d_state=130),
        dict(length=40, headdim=5, d_state=3, heads=6, groups=3),
    ],
    ids=str,
)
def test_equals_float64(sizes, bounded):
    """Outputs, last state and all gradients, those of A and the bias too, whose terms cancel; blocks full and not,
    several of channels and of states."""
    values = leaves(**sizes)
    seq_idx = random_documents(values["x"].shape[1], len(values["x"])) if bounded else None
    assert_like_reference(ours, reference, values, MOST[torch.float32], seq_idx=seq_idx)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_halves(dtype):
    got = assert_like_reference(
        ours, reference, leaves(dtype=dtype), MOST[dtype], seq_idx=random_documents(40)
    )
    assert (
        {got[f"gradient of {name}"].dtype for name in ACTIVATIONS}
        == {got["output 0"].dtype}
        == {dtype}
    )
    assert got["output 1"].dtype == got["gradient of initial_state"].dtype == torch.float32


@pytest.mark.parametrize("absent", ["D", "dt_bias", "initial_state"])
def test_what_is_not_given(absent):
    values = leaves(length=20) | {absent: None}
    assert_like_reference(
        ours,
        reference,
        {name: value for name, value in values.items() if value is not None},
        MOST[torch.float32],
        **({} if absent == "initial_state" else {absent: None}),
    )


@pytest.mark.torch22
@pytest.mark.parametrize("only", [0, 1])
def test_one_output_alone_has_gradients(only):
    def one(backend):
        return lambda **values: backend(**values)[only]

    assert_like_reference(one(ours), one(reference), leaves(length=40), MOST[torch.float32])


@pytest.mark.slow
@pytest.mark.parametrize("bounded", [False, True], ids=["one document", "seq_idx"])
def test_segments_of_a_sequence_change_rounding_alone(monkeypatch, bounded):
    values = leaves(length=520, headdim=16, d_state=16)
    seq_idx = random_documents(520) if bounded else None
    for programs in (1, 6):
        monkeypatch.setitem(SWEEP, (8, 0), {"P": 16, "programs": programs, "num_warps": 1})
        monkeypatch.setitem(GRADIENTS, (8, 0), {"P": 16, "BLOCK": 1, "num_warps": 1})
        assert_like_reference(ours, reference, values, MOST[torch.float32], seq_idx=seq_idx)


def test_equal_runs_are_equal_bit_for_bit():
    values = leaves(dtype=torch.bfloat16)
    assert_same_bits(evaluate(ours, values), evaluate(ours, values))


def test_rows_alone_are_equal_bit_for_bit():
    """Whatever else a batch holds: no sum crosses rows but those for A, D and the bias."""
    values = leaves(batch=2)
    batch = evaluate(ours, values)
    for row in (0, 1):
        own = {
            name: value[row : row + 1] if value.dim() > 1 else value
            for name, value in values.items()
        }
        alone = evaluate(ours, own)
        for name in ("output 0", "output 1"):
            assert torch.equal(alone[name][0], batch[name][row]), name


@pytest.mark.parametrize("boundary", [1, 20, 32])
def test_no_leak_between_documents(boundary):
    """Whatever one document holds, the other's outputs and gradients stay the same to the last bit, both ways."""

    def run(changed):
        values = leaves(length=50)
        for name in ACTIVATIONS:
            values[name][:, changed] = 7 * values[name][:, changed].flip(1) + 3
        inputs = [values[name].requires_grad_() for name in ACTIVATIONS]
        y = ours(**values, seq_idx=seq_idx)[0]
        weights = torch.randn(y.shape, generator=torch.Generator().manual_seed(3))
        weights[:, changed] *= -5
        return y, *torch.autograd.grad((y * weights).sum(), inputs)

    seq_idx = (torch.arange(50) >= boundary).int().expand(1, 50)
    first = slice(0, boundary)
    second = slice(boundary, 50)
    before = run(slice(0, 0))
    for changed, kept in ((first, second), (second, first)):
        after = run(changed)
        assert not torch.equal(before[0][:, changed], after[0][:, changed])
        assert all(torch.equal(a[:, kept], b[:, kept]) for a, b in zip(before, after))


@pytest.mark.parametrize("bias", [-60.0, 5.0, 300.0, 20000.0])
def test_extreme_dt(bias):
    """From no step at all to steps that forget everything: right, and every gradient finite and right."""
    values = leaves()
    values["dt_bias"] += bias
    assert_like_reference(ours, reference, values, 1e-4)


def test_slices_of_a_projection_are_taken_as_they_are(monkeypatch):
    """x, B, C from one tensor, dt from another: not copied, and right."""
    values = leaves(length=40)
    heads = values["x"].shape[2:]
    groups = values["B"].shape[2:]
    joined = torch.cat([values[name].flatten(2) for name in ("x", "B", "C")], dim=2)
    steps = torch.cat([torch.ones(1, 40, 7), values["dt"]], dim=2)
    x, B, C = joined.split([values[name].flatten(2).shape[2] for name in ("x", "B", "C")], dim=2)
    slices = dict(
        x=x.unflatten(2, heads),
        B=B.unflatten(2, groups),
        C=C.unflatten(2, groups),
        dt=steps[..., 7:],
    )
    expected = ours(**values)
    with monkeypatch.context() as patch:
        patch.setattr(
            torch.Tensor,
            "contiguous",
            lambda tensor: pytest.fail(f"a copy of {tuple(tensor.shape)}"),
        )
        assert not torch.equal(ours(**values | slices | {"initial_state": None})[0], expected[0])
    assert_same_bits(evaluate(ours, values | slices), evaluate(ours, values))
    turned = values | {
        name: values[name].transpose(1, -1).contiguous().transpose(1, -1) for name in ACTIVATIONS
    }
    assert_same_bits(evaluate(ours, turned), evaluate(ours, values))


@pytest.mark.torch22
@pytest.mark.parametrize("dtype", MOST, ids=str)
def test_tensors_without_content_give_the_same_shapes(dtype):
    values = leaves(length=20, dtype=dtype)
    real = evaluate(ours, values)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = evaluate(ours, {name: mode.from_tensor(value) for name, value in values.items()})
    assert {name: (value.shape, value.dtype, value.stride()) for name, value in fake.items()} == {
        name: (value.shape, value.dtype, value.stride()) for name, value in real.items()
    }


@pytest.mark.torch22
@pytest.mark.slow
def test_is_one_call_to_torch_compile():
    torch._dynamo.reset()
    values = leaves()
    seq_idx = random_documents(40)
    compiled = torch.compile(lambda **given: ours(**given), backend="aot_eager", fullgraph=True)
    assert_same_bits(
        evaluate(compiled, values, seq_idx=seq_idx), evaluate(ours, values, seq_idx=seq_idx)
    )


CONFIG = ModelConfig(
    d_model=16, n_layer=2, layers="mamba2", vocab_size=64, d_state=16, headdim=8, chunk_size=16
)


def model(backend):
    made = MambaLM(
        CONFIG,
        backends=REFERENCE | {"ssd": backend},
        compute_dtype=torch.float32,
        reset_at_documents=True,
    )
    with torch.no_grad():
        for (name, described), parameter in zip(parameters(CONFIG).items(), made.parameters()):
            parameter.copy_(initial_value(name, described, 0))
    return made


def test_a_model_with_documents_has_the_same_loss_and_gradients():
    tokens = torch.randint(64, (1, 41), generator=torch.Generator().manual_seed(0))
    results = []
    for backend in ("triton", "reference"):
        made = model(backend)
        loss = made(tokens[:, :-1], labels=tokens[:, 1:], seq_idx=random_documents(40))
        loss.backward()
        results.append(
            {"loss": loss.detach()} | {name: leaf.grad for name, leaf in made.named_parameters()}
        )
    assert_like(*results, 1e-5)


def test_generation_resumes_from_the_state():
    """A sequence in two parts, the second from the first one's last state, is the whole."""
    values = leaves(length=50)
    whole, last = ours(**values)
    with torch.no_grad():
        first, state = ours(
            **{
                name: value[:, :23] if name in ACTIVATIONS else value
                for name, value in values.items()
            }
        )
        rest = {
            name: value[:, 23:] if name in ACTIVATIONS else value for name, value in values.items()
        }
        second, end = ours(**rest | {"initial_state": state})
    assert_like({"y": torch.cat([first, second], 1), "last": end}, {"y": whole, "last": last}, 1e-6)
