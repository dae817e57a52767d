"""Whole mixers of Triton kernels beside the reference parts in float64; models of Triton backends alone."""

from functools import partial

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from mamba_fsdp.model.config import ModelConfig
from mamba_fsdp.model.layers import MIXERS
from mamba_fsdp.model.lm import MambaLM
from mamba_fsdp.ops.backends import OPERATORS, REFERENCE
from mamba_fsdp.ops.conv import triton as conv_triton
from mamba_fsdp.ops.scan import triton as scan_triton
from mamba_fsdp.ops.ssd import triton as ssd_triton
from tests.support.compare import assert_like, double, evaluate

WHOLES = {operator: "triton" for operator, names in OPERATORS.items() if "triton" in names}
WHOLES = REFERENCE | WHOLES
SIZES = {
    "mamba1": dict(d_model=10, d_state=5, dt_rank=3),
    "mamba2": dict(d_model=12, d_state=3, headdim=12, ngroups=2, d_conv=3),
}
KINDS = pytest.mark.parametrize("kind", SIZES)
LENGTHS = {
    "mamba1": 9,
    "mamba2": 34,
}  # with the blocks below, a chunk of the scan or a pair of SSD's, and some more


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """The interpreter takes as long for rows that are not there."""
    for table in (conv_triton.FORWARD, conv_triton.BACKWARD):
        monkeypatch.setitem(table, (8, 0), {"ROWS": 18, "CHANNELS": 32, "num_warps": 1})
    monkeypatch.setattr(scan_triton, "CHUNK", 8)
    monkeypatch.setattr(ssd_triton, "CHUNK", 16)


def build(kind, backends=WHOLES, **sizes):
    config = ModelConfig(layers=kind, **sizes or SIZES[kind])
    return MIXERS[config.layers](config, backends)


def mixer(kind, backends=WHOLES):
    """(a function of x and the parameters, x and parameters by name, with large values)"""
    layer = build(kind, backends)
    generator = torch.Generator().manual_seed(5)
    values = {"x": torch.randn(1, LENGTHS[kind], layer.config.d_model, generator=generator)}
    for name, parameter in layer.named_parameters():
        value = torch.randn(parameter.shape, generator=generator)
        if name.endswith("proj.weight"):
            value /= parameter.shape[1] ** 0.5
        values[name.replace(".", "/")] = value

    def run(x, seq_idx=None, **parameters):
        named = {name.replace("/", "."): value for name, value in parameters.items()}
        return torch.func.functional_call(layer, named, (x, seq_idx))

    def run_twice(x, seq_idx, **parameters):
        """The first time it is computed again for the backward pass."""
        again = partial(run, seq_idx=seq_idx, **parameters)
        x = checkpoint(again, x, use_reentrant=False, preserve_rng_state=False)
        return run(x, seq_idx, **parameters)

    return run_twice, values


def seq_idx(length, batch=1):
    return (torch.arange(length) >= 4).long().expand(batch, length) + 3


@KINDS
def test_equals_float64(kind):
    """In fp32, odd sizes, over chunks that hand on their states; gradients of everything, which add up where a mixer is
    used twice and activations are recomputed. Tensors without content give the same shapes and types."""
    run, values = mixer(kind)
    documents = seq_idx(LENGTHS[kind])
    results = evaluate(run, values, seq_idx=documents)
    reference, _ = mixer(kind, REFERENCE)
    expected = evaluate(reference, double(values), seq_idx=documents)
    assert_like(results, expected, 1e-5)  # sums over rows, which cancel
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        empty = {name: mode.from_tensor(value) for name, value in values.items()}
        fake = evaluate(run, empty, seq_idx=documents)
    for name, result in results.items():
        assert (fake[name].shape, fake[name].dtype) == (result.shape, result.dtype), name
    for name, value in values.items():
        assert results[f"gradient of {name}"].dtype == value.dtype


def losses(backends, compiled=False):
    """Before and after a step of SGD of a small model, and the weights behind it."""
    length = 9
    config = ModelConfig(
        layers="mamba1,mamba2",
        n_layer=2,
        vocab_size=40,
        tie_embeddings=True,
        headdim=10,
        **SIZES["mamba1"],
    )
    model = MambaLM(config, backends=backends, reset_at_documents=True)
    generator = torch.Generator().manual_seed(3)
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.3, generator=generator)
    if compiled:
        for block in model.backbone.layers:
            block.mixer.compile(backend="aot_eager", fullgraph=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    tokens = torch.randint(0, 40, (2, length + 1), generator=generator)
    documents = seq_idx(length, batch=2)
    before = model(tokens[:, :-1], tokens[:, 1:], documents) / (2 * length)
    before.backward()
    optimizer.step()
    with torch.no_grad():
        after = model(tokens[:, :-1], tokens[:, 1:], documents) / (2 * length)
    weights = [parameter.flatten() for parameter in model.parameters()]
    return torch.cat([before.view(1), after.view(1), *weights]).detach()


def test_a_model_of_triton_kernels_trains_as_a_reference_one():
    """Losses and weights within fp32's rounding; the same bits in a second run, as deterministic=true promises, in which
    torch.compile takes each mixer as one call."""
    torch._dynamo.reset()
    kernels = losses(WHOLES)
    reference = losses(REFERENCE)
    torch.testing.assert_close(kernels, reference, rtol=1e-6, atol=1e-6)
    assert not torch.equal(kernels, reference)
    assert torch.equal(kernels, losses(WHOLES, compiled=True))
