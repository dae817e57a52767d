"""The selective scan's Triton kernels beside the reference backend in float64, and as an operator that torch knows."""

from functools import partial

import pytest
import torch
from compare import assert_like, assert_like_reference, assert_same_bits, evaluate
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from config.model_config import ModelConfig
from mamba_fsdp.model.generate import generate
from mamba_fsdp.model.init import initial_value
from mamba_fsdp.model.lm import MambaLM
from mamba_fsdp.model.spec import parameters
from mamba_fsdp.ops.backends import REFERENCE
from mamba_fsdp.ops.scan import selective_scan
from mamba_fsdp.ops.scan import triton as backend

scan, reference = (
    partial(selective_scan, return_last_state=True, backend=name)
    for name in ("triton", "reference")
)


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Rows are one segment of several chunks."""
    torch.manual_seed(0)
    monkeypatch.setattr(backend, "CHUNK", 8)
    monkeypatch.setattr(backend, "FILL", 1)


def inputs(batch, length, channels, states, dtype=torch.float32, without=()):
    """Leaves of a scan; u and z, B and C are slices of one tensor, as behind the model's projections."""
    xz = torch.randn(batch, length, 2 * channels).to(dtype)
    x_dbl = torch.randn(batch, length, 3 + 2 * states).to(dtype)
    u, z = xz.chunk(2, dim=-1)
    _, B, C = x_dbl.split([3, states, states], dim=-1)
    seq_idx = (torch.rand(batch, length) < 0.15).cumsum(1) + 3
    dt = 2 * torch.randn(batch, length, channels).to(dtype) - 1
    leaves = dict(
        u=u,
        dt=dt,
        A=-torch.rand(channels, states).exp(),
        B=B,
        C=C,
        D=torch.randn(channels),
        z=z,
        dt_bias=torch.randn(channels),
        seq_idx=seq_idx,
        initial_state=torch.randn(batch, channels, states),
    )
    return leaves | dict.fromkeys(without)


@pytest.mark.parametrize(
    "sizes, segments, without",
    [
        pytest.param((2, 19, 35, 16), 1, (), id="odd", marks=pytest.mark.slow),
        pytest.param((1, 12, 32, 16), 1, (), id="no masks"),
        pytest.param((1, 21, 3, 16), 3, (), id="in segments"),
        pytest.param((1, 16, 32, 2), 2, ("seq_idx", "z"), id="in segments without masks"),
        pytest.param((1, 11, 2, 37), 2, (), id="37 states", marks=pytest.mark.slow),
        pytest.param(
            (1, 9, 2, 20), 1, ("D", "z", "dt_bias", "seq_idx"), id="20 states, only what must be"
        ),
        pytest.param((2, 1, 3, 1), 1, ("initial_state",), id="one of all"),
    ],
)
def test_like_portable_in_float64(monkeypatch, sizes, segments, without):
    monkeypatch.setattr(backend, "FILL", segments * sizes[0] * -(-sizes[2] // 32))
    assert_like_reference(scan, reference, inputs(*sizes, without=without))


@pytest.mark.slow
def test_most_states(monkeypatch):
    leaves = inputs(1, 2, 2, 256)
    assert_like_reference(scan, reference, leaves, 3e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_in_and_out(dtype):
    leaves = inputs(1, 10, 5, 4, dtype)
    got = assert_like_reference(scan, reference, leaves)
    assert (
        got["output 0"].dtype == got["gradient of B"].dtype == dtype
        and got["output 1"].dtype == torch.float32
    )


@pytest.mark.slow
def test_small_and_large_steps():
    """softplus and its slope in all their ranges, relative to each value."""
    leaves = inputs(1, 24, 1, 1, without=("seq_idx", "z", "initial_state", "dt_bias"))
    leaves |= dict(
        dt=torch.linspace(-30, 30, 24).view(1, 24, 1),
        u=torch.ones(1, 24, 1),
        A=-1e-9 * torch.ones(1, 1),
    )
    each = []
    for form_of, made in (
        (scan, leaves),
        (reference, {k: v if v is None else v.double() for k, v in leaves.items()}),
    ):
        dt = made["dt"].detach().requires_grad_()
        y, _ = form_of(**made | dict(dt=dt, B=torch.ones_like(dt), C=torch.ones_like(dt), D=None))
        each.append((y.diff(dim=1), torch.autograd.grad(y[:, -1].sum(), dt)[0]))
    for got, expected in zip(*each):
        torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=0)


def results(leaves):
    """y, the last state and all gradients of the sum of both."""
    leaves = {
        name: leaf.detach().requires_grad_()
        if torch.is_tensor(leaf) and leaf.is_floating_point()
        else leaf
        for name, leaf in leaves.items()
    }
    y, last = scan(**leaves)
    wanted = {
        name: leaf for name, leaf in leaves.items() if torch.is_tensor(leaf) and leaf.requires_grad
    }
    return dict(
        zip(wanted, torch.autograd.grad(y.sum() + last.sum(), list(wanted.values())))
    ) | dict(y=y, last=last)


@pytest.mark.slow
def test_the_same_bits_twice_and_in_any_batch():
    leaves = inputs(2, 5, 34, 3)
    both = results(leaves)
    assert_same_bits(both, results(leaves))
    whole = {name: leaves[name] for name in ("A", "D", "dt_bias")}
    alone = results({name: leaf[1:] for name, leaf in leaves.items() if name not in whole} | whole)
    rows = {name: value for name, value in alone.items() if name not in whole}
    assert_same_bits(rows, {name: both[name][1:] for name in rows})


def test_rows_are_cut_where_they_are_too_few_for_a_gpu(monkeypatch):
    monkeypatch.setattr(backend, "FILL", 1024)
    monkeypatch.setattr(backend, "CHUNK", 64)

    def grid(batch, length, channels):
        made = inputs(batch, 1, 1, 1)
        wide = {
            name: made[name].expand(batch, length, channels) for name in ("u", "dt", "z", "B", "C")
        }
        call = backend._Scan(
            "scan_forward",
            **wide,
            A=-torch.ones(1, 1).expand(channels, 1),
            D=None,
            dt_bias=None,
            seq_idx=None,
        )
        chunks = call.entries[1]
        in_each = call.shared["segment_chunks"]
        assert (call.grid[1] - 1) * in_each < chunks <= call.grid[1] * in_each
        return call.grid

    assert grid(8, 128, 4096) == (128, 1, 8)
    assert grid(4, 128, 4096) == (128, 2, 4)
    assert grid(2, 576, 2048) == (64, 5, 2)  # 9 chunks in 8 segments would be 2 each: 5 are enough
    assert grid(1, 100, 33) == (2, 2, 1)


def test_states_clear_at_a_start_however_slow_the_decay():
    """A whole document of steps of size 0 in front; nothing of the initial state gets through."""
    leaves = inputs(1, 9, 2, 2, without=("z", "D", "dt_bias"))
    leaves |= dict(
        seq_idx=torch.tensor([[0] * 5 + [1] * 4]),
        A=torch.full((2, 2), -1e-9),
        dt=torch.full((1, 9, 2), -200.0),
        initial_state=torch.full((1, 2, 2), 1e6),
    )
    y, last = scan(**leaves)
    assert y[:, :5].abs().min() > 1e3 and max(y[:, 5:].abs().max(), last.abs().max()) < 1e-30


def compiled(**leaves):
    def function(scale, u, **rest):
        y, last = scan(u=u * scale, **rest)
        return y * scale, last

    torch._dynamo.reset()
    return torch.compile(function, fullgraph=True, backend="aot_eager")(torch.tensor(2.0), **leaves)


@pytest.mark.slow
def test_within_torch_compile():
    leaves = inputs(1, 6, 3, 2)
    double = {
        name: leaf.double() if torch.is_tensor(leaf) and leaf.is_floating_point() else leaf
        for name, leaf in leaves.items()
    }

    def reference(u, **rest):
        y, last = reference(u=2 * u, **rest)
        return 2 * y, last

    assert_like(evaluate(compiled, leaves), evaluate(reference, double))


@pytest.mark.parametrize("without", [(), ("z", "D", "dt_bias", "seq_idx", "initial_state")])
def test_tensors_without_content_have_the_same_form(without):
    leaves = inputs(2, 9, 3, 4, torch.bfloat16, without)
    grad = torch.randn(2, 9, 3).bfloat16()

    def shapes(grad, *named):
        out, last, entries = torch.ops.mamba_fsdp.scan_forward(*named, True)
        made = out, last, entries, *torch.ops.mamba_fsdp.scan_backward(grad, None, *named, entries)
        return [(tensor.shape, tensor.stride(), tensor.dtype) for tensor in made]

    with torch.no_grad():
        with FakeTensorMode() as mode:
            fake = shapes(
                *(None if t is None else mode.from_tensor(t) for t in (grad, *leaves.values()))
            )
        assert fake == shapes(grad, *leaves.values())


@pytest.mark.slow
def test_twice_and_in_a_checkpoint():
    """The backward pass leaves what it needs as it was, and takes what is made anew."""
    leaves = inputs(1, 5, 3, 2)
    plain = results(leaves)
    u = leaves["u"].detach().requires_grad_()
    rest = {name: leaf for name, leaf in leaves.items() if name != "u"}
    y, last = checkpoint(lambda u: scan(u=u, **rest), u, use_reentrant=False)
    assert torch.equal(torch.autograd.grad(y.sum() + last.sum(), u)[0], plain["u"])
    y, last = scan(u=u, **rest)
    (first,) = torch.autograd.grad(y.sum() + last.sum(), u, retain_graph=True)
    (second,) = torch.autograd.grad(y.sum() + last.sum(), u)
    assert torch.equal(first, plain["u"]) and torch.equal(second, first)


@pytest.mark.slow
def test_output_again_and_gradient_of_the_gate_into_a_view():
    leaves = inputs(1, 7, 3, 2)
    *named, state = leaves.values()
    with torch.no_grad():
        out, _, entries = backend.scan_forward(*named, state)
        assert backend.scan_forward(*named, state, keep=False)[2].numel() == 0
        views = torch.zeros(1, 7, 6)
        made = backend.scan_backward(
            torch.ones(1, 7, 3), None, *named, entries, want_out=True, grad_z=views[..., 3:]
        )
        plain = backend.scan_backward(torch.ones(1, 7, 3), None, *named, entries)
    torch.testing.assert_close(made[-1], out, rtol=1e-6, atol=1e-6)
    assert (
        torch.equal(views[..., 3:], plain[6])
        and not views[..., :3].any()
        and plain[-1].numel() == 0
    )


def small_model(form_of_scan, **more):
    config = ModelConfig(layers="mamba1", d_model=6, n_layer=2, vocab_size=11, d_state=4)
    model = MambaLM(config, backends=REFERENCE | {"scan": form_of_scan}, **more)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(
                initial_value(name, parameters(config)[name], 1)
                * (3 if "embedding" in name else 1.2)
            )
    return model


@pytest.mark.slow
def test_a_model_has_the_loss_and_gradients_of_the_portable_form():
    tokens, labels = torch.randint(0, 11, (2, 2, 12))
    seq_idx = torch.tensor([[0] * 5 + [1] * 7, [0] * 12])
    each = []
    for name in ("triton", "reference"):
        model = small_model(name, reset_at_documents=True)
        loss = model(tokens, labels=labels, seq_idx=seq_idx)
        each.append((loss, *torch.autograd.grad(loss, list(model.parameters()))))
    for got, expected in zip(*each):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    in_parts = small_model("triton", reset_at_documents=True, part=5)(
        tokens, labels=labels, seq_idx=seq_idx
    )
    torch.testing.assert_close(in_parts, each[0][0].detach(), rtol=1e-6, atol=0)


@pytest.mark.slow
def test_generation_continues_from_the_state_of_the_prompt():
    prompt = torch.randint(0, 11, (2, 7))
    texts = [
        torch.stack(list(generate(small_model(name), prompt, length=6, temperature=0)))
        for name in ("triton", "reference")
    ]
    assert torch.equal(*texts)
