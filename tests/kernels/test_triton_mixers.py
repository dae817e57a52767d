"""Whole mixers of Triton kernels beside the reference parts in float64; what they keep; models of Triton backends alone."""

from functools import partialmethod
from types import SimpleNamespace

import pytest
import torch
from compare import assert_like, assert_same_bits, double, evaluate
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from mamba_fsdp.errors import UserError
from mamba_fsdp.model.layers import MIXERS
from mamba_fsdp.model.lm import MambaLM
from mamba_fsdp.ops import mamba1, mamba2, triton
from mamba_fsdp.ops.backends import BACKENDS, MIXER_PARTS, OPERATORS, REFERENCE
from mamba_fsdp.ops.conv import triton as conv_triton
from mamba_fsdp.ops.mamba2 import triton as mamba2_triton
from mamba_fsdp.settings.model_config import ModelConfig
from mamba_fsdp.settings.train_config import TrainConfig
from mamba_fsdp.trainer.first_use import FirstUse, Record

PARTS = REFERENCE | {
    operator: "triton" for operator in REFERENCE if "triton" in OPERATORS[operator]
}
WHOLES = PARTS | {mixer: "triton" for mixer in MIXER_PARTS}
SIZES = {
    "mamba1": dict(d_model=10, d_state=5, dt_rank=3),
    "mamba2": dict(d_model=12, d_state=3, headdim=6, ngroups=2, d_conv=3),
}
KINDS = pytest.mark.parametrize("kind", SIZES)
LENGTH = 9


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """The interpreter takes as long for rows that are not there."""
    for table in (conv_triton.FORWARD, conv_triton.BACKWARD):
        monkeypatch.setitem(table, (8, 0), {"ROWS": 16, "CHANNELS": 32, "num_warps": 1})


def build(kind, backends=WHOLES, **sizes):
    config = ModelConfig(layers=kind, **sizes or SIZES[kind])
    return MIXERS[config.layers](config, backends)


def mixer(kind, backends=WHOLES, length=LENGTH):
    """(a function of x and the parameters, x and parameters by name, with large values)"""
    layer = build(kind, backends)
    generator = torch.Generator().manual_seed(5)
    values = {"x": torch.randn(2, length, layer.config.d_model, generator=generator)}
    for name, parameter in layer.named_parameters():
        value = torch.randn(parameter.shape, generator=generator)
        values[name.replace(".", "/")] = (
            value / parameter.shape[1] ** 0.5 if name.endswith("proj.weight") else value
        )

    def run(x, seq_idx=None, **parameters):
        named = {name.replace("/", "."): value for name, value in parameters.items()}
        return torch.func.functional_call(layer, named, (x, seq_idx))

    return run, values


def seq_idx(start=4):
    return (torch.arange(LENGTH) >= torch.tensor([[start], [0]])).long() + 3


@KINDS
def test_equals_float64(kind):
    """In fp32, odd sizes; gradients of everything, in the types of their tensors; equal bits where activations are
    recomputed."""
    run, values = mixer(kind)
    reference, _ = mixer(kind, REFERENCE)
    results = evaluate(run, values, seq_idx=seq_idx())
    assert_like(results, evaluate(reference, double(values), seq_idx=seq_idx()))
    for name, value in values.items():
        assert results[f"gradient of {name}"].dtype == value.dtype

    def recomputing(x, **parameters):
        return checkpoint(lambda x: run(x, seq_idx(), **parameters), x, use_reentrant=False)

    assert_same_bits(evaluate(recomputing, values), results)


@KINDS
def test_the_first_minute_finds_them_right(kind, monkeypatch):
    """Part by part and whole, in bf16 with documents, by the bounds that hold on a GPU; one wrong sign is found."""
    monkeypatch.setitem(BACKENDS, "triton", "cpu")
    monkeypatch.setattr(FirstUse, "run", partialmethod(FirstUse.run, length=20))
    settings = TrainConfig(ModelConfig(layers=kind, **SIZES[kind]))
    settings.training.mixed_precision = "bf16"
    settings.training.batch_size = 2
    settings.data.reset_at_documents = True
    use = FirstUse(settings, torch.device("cpu"))
    assert use.prove(Record({})) == {}
    assert use.resolve({}, preferred="triton").backends[kind] == "triton"
    whole = {"mamba1": mamba1, "mamba2": mamba2}[kind].BACKENDS
    right = getattr(whole["triton"], f"{kind}_mixer")
    wrong = SimpleNamespace(**{f"{kind}_mixer": lambda *inputs: -right(*inputs)})
    monkeypatch.setitem(whole, "triton", wrong)
    with pytest.raises(UserError, match="of its largest value;"):
        use.check(WHOLES)


@KINDS
def test_chunks_hand_on_their_states(kind):
    """The states that one backward pass keeps and the other makes again, in sequences of several chunks."""
    values = mixer(kind, length=66)[1]
    values["x"] = values["x"][:1]
    documents = (torch.arange(66) >= 40).int().view(1, -1)
    results = evaluate(mixer(kind)[0], values, seq_idx=documents)
    expected = evaluate(mixer(kind, REFERENCE)[0], double(values), seq_idx=documents)
    assert_like(results, expected, 1e-5)  # sums over rows, which cancel


@KINDS
def test_gradients_add_up_where_it_is_used_twice(kind):
    run, values = mixer(kind)
    values["x"] = values["x"][:1]
    reference, _ = mixer(kind, REFERENCE)
    assert_like(
        evaluate(lambda x, **p: run(run(x, **p), **p), values),
        evaluate(lambda x, **p: reference(reference(x, **p), **p), double(values)),
        1e-5,
    )


def kept(kind, backends):
    """What a mixer's backward pass waits with, beside its input and weights, in tensors of (token, d_inner): of bf16,
    at the sizes of mamba-1.4b or mamba2-1.3b, without content."""
    storages = {}
    with FakeTensorMode():
        layer = build(
            kind,
            backends,
            d_model=2048,
            **dict(d_state=128, headdim=64) if kind == "mamba2" else {},
        )
        weights = {
            name: weight.detach().bfloat16().requires_grad_()
            for name, weight in layer.named_parameters()
        }
        x = torch.empty(1, 2048, 2048, dtype=torch.bfloat16, requires_grad=True)

        def pack(tensor):
            storages[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            output = torch.func.functional_call(layer, weights, (x,))  # which keeps the storages
        for tensor in (x, *weights.values()):
            storages.pop(tensor.untyped_storage()._cdata, None)
        assert output.shape == x.shape
        return sum(storages.values()) / (2048 * 4096 * 2)


@pytest.mark.parametrize("kind, most", [("mamba1", 2.6), ("mamba2", 2.1)])
def test_keeps_less_than_its_parts(kind, most):
    """Mamba-1: x, z, x_proj's output and the states of every 64th position in fp32. Mamba-2: in_proj's output.
    mamba-ssm keeps the outputs of scan and SSD too."""
    whole = kept(kind, WHOLES)
    parts = kept(kind, PARTS)
    assert most - 0.1 <= whole <= most and parts > whole + 2


@pytest.mark.slow
@KINDS
def test_is_one_call_to_torch_compile(kind):
    torch._dynamo.reset()
    layer = build(kind)
    x = torch.randn(2, LENGTH, SIZES[kind]["d_model"], requires_grad=True)
    for parameter in layer.parameters():
        parameter.data.normal_(0, 0.3)

    def results(function):
        output = function(x, seq_idx())
        return [output, *torch.autograd.grad(output.square().sum(), [x, *layer.parameters()])]

    compiled = torch.compile(lambda *inputs: layer(*inputs), backend="aot_eager", fullgraph=True)
    assert all(torch.equal(a, b) for a, b in zip(results(compiled), results(layer)))


def test_torch_compile_makes_kernels_of_the_gated_norm(monkeypatch):
    """On a GPU, but with torch 2.2. What it is given compiles whole, and gives what the function gives."""
    y, z, grad = torch.randn(3, 2, 5, 12).bfloat16()
    weight = torch.rand(12)
    scale = mamba2_triton._norm(y, z, weight, 1e-5, 2)[1]
    for norm, inputs in (
        (mamba2_triton._norm, (y, z, weight, 1e-5, 2)),
        (mamba2_triton._norm_backward, (grad, y, z, weight, scale)),
    ):
        compiled = torch.compile(norm.__wrapped__, backend="aot_eager", fullgraph=True)
        torch.testing.assert_close(compiled(*inputs), norm(*inputs))
    on_gpu = SimpleNamespace(device=torch.device("cuda"))
    monkeypatch.setattr(torch, "compile", lambda function, dynamic: lambda given: "compiled")
    for version, expected in (("2.2.2+cu121", "plain"), ("2.13.0", "compiled")):
        monkeypatch.setattr(torch, "__version__", version)
        assert triton.compiled(lambda given: "plain")(on_gpu) == expected


@KINDS
def test_tensors_without_content_give_the_same_shapes(kind):
    run, values = mixer(kind)
    real = evaluate(run, values)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = evaluate(run, {name: mode.from_tensor(value) for name, value in values.items()})
    assert {name: (value.shape, value.dtype) for name, value in fake.items()} == {
        name: (value.shape, value.dtype) for name, value in real.items()
    }


def losses(backends):
    """Before and after a step of SGD of a small model, and the weights behind it."""
    config = ModelConfig(
        layers="mamba1,mamba2",
        n_layer=2,
        vocab_size=40,
        tie_embeddings=True,
        headdim=5,
        **SIZES["mamba1"],
    )
    model = MambaLM(config, backends=backends, reset_at_documents=True)
    generator = torch.Generator().manual_seed(3)
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.3, generator=generator)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    tokens = torch.randint(0, 40, (2, LENGTH + 1), generator=generator)
    before = model(tokens[:, :-1], tokens[:, 1:], seq_idx()) / (2 * LENGTH)
    before.backward()
    optimizer.step()
    with torch.no_grad():
        after = model(tokens[:, :-1], tokens[:, 1:], seq_idx()) / (2 * LENGTH)
    weights = [parameter.flatten() for parameter in model.parameters()]
    return torch.cat([before.view(1), after.view(1), *weights]).detach()


def test_a_model_of_triton_kernels_trains_as_a_reference_one():
    """Losses and weights within fp32's rounding; the same bits in a second run, as deterministic=true promises."""
    kernels = losses(WHOLES)
    reference = losses(REFERENCE)
    torch.testing.assert_close(kernels, reference, rtol=1e-6, atol=1e-6)
    assert not torch.equal(kernels, reference) and torch.equal(kernels, losses(WHOLES))
