"""Compares whole mixers of Triton kernels with the reference backend in float64, and measures the tensors that they
keep for the backward pass."""

from functools import partial

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from mamba_fsdp.model.config import ModelConfig
from mamba_fsdp.model.layers import MIXERS
from mamba_fsdp.ops.backends import MIXER_PARTS, OPERATORS, REFERENCE
from mamba_fsdp.ops.conv import triton as conv_triton
from mamba_fsdp.ops.scan import triton as scan_triton
from mamba_fsdp.ops.ssd import triton as ssd_triton
from tests.support.compare import assert_like, double, evaluate

PARTS = REFERENCE | {
    operator: "triton" for operator in REFERENCE if "triton" in OPERATORS[operator]
}
WHOLES = PARTS | {mixer: "triton" for mixer in MIXER_PARTS}
SIZES = {
    "mamba1": dict(d_model=10, d_state=5, dt_rank=3),
    "mamba2": dict(d_model=12, d_state=3, headdim=12, ngroups=2, d_conv=3),
}
KINDS = pytest.mark.parametrize("kind", SIZES)
# With the blocks below, mamba1 has one position more than a chunk of the scan, and mamba2 two more than two chunks of SSD.
LENGTHS = {"mamba1": 9, "mamba2": 34}


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Makes the blocks small, because the interpreter also spends time on rows of a block that do not exist."""
    for table in (conv_triton.FORWARD, conv_triton.BACKWARD):
        monkeypatch.setitem(table, (8, 0), {"ROWS": 18, "CHANNELS": 32, "num_warps": 1})
    monkeypatch.setattr(scan_triton, "CHUNK", 8)
    monkeypatch.setattr(ssd_triton, "CHUNK", 16)


def build(kind, backends=WHOLES, **sizes):
    config = ModelConfig(layers=kind, **sizes or SIZES[kind])
    return MIXERS[config.layers](config, backends)


def mixer(kind, backends=WHOLES):
    """Returns (a function of x, seq_idx and the parameters; {name: value} of x and the parameters). The function
    applies the mixer twice."""
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
        """Applies the mixer twice. The first application is recomputed in the backward pass."""
        again = partial(run, seq_idx=seq_idx, **parameters)
        x = checkpoint(again, x, use_reentrant=False, preserve_rng_state=False)
        return run(x, seq_idx, **parameters)

    return run_twice, values


def seq_idx(length, batch=1):
    return (torch.arange(length) >= 4).long().expand(batch, length) + 3


@KINDS
def test_equals_float64(kind):
    """In fp32, output and all gradients agree with float64, also if a mixer is used twice and activations are
    recomputed. Fake tensors give the same shapes and dtypes."""
    run, values = mixer(kind)
    documents = seq_idx(LENGTHS[kind])
    results = evaluate(run, values, seq_idx=documents)
    reference, _ = mixer(kind, REFERENCE)
    expected = evaluate(reference, double(values), seq_idx=documents)
    # The bound is above the default, because terms of sums over rows cancel.
    assert_like(results, expected, 1e-5)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        empty = {name: mode.from_tensor(value) for name, value in values.items()}
        fake = evaluate(run, empty, seq_idx=documents)
    for name, result in results.items():
        assert (fake[name].shape, fake[name].dtype) == (result.shape, result.dtype), name
    for name, value in values.items():
        assert results[f"gradient of {name}"].dtype == value.dtype


def kept(kind, backends):
    """Returns the size of the tensors that a mixer saves for its backward pass, in units of a bf16 tensor of shape
    (tokens, d_inner).

    The input and the weights of the mixer do not count. The sizes are those of mamba-1.4b or mamba2-1.3b.
    """
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
            # The output keeps the storages alive, so that no address occurs twice.
            output = torch.func.functional_call(layer, weights, (x,))
        for tensor in (x, *weights.values()):
            storages.pop(tensor.untyped_storage()._cdata, None)
        assert output.shape == x.shape
        return sum(storages.values()) / (2048 * 4096 * 2)


@pytest.mark.parametrize("kind, most", [("mamba1", 2.6), ("mamba2", 2.1)])
def test_keeps_less_than_its_parts(kind, most, monkeypatch):
    """A mixer that is computed as a whole keeps less memory for the backward pass than its operators one by one. The
    difference is more than two bf16 tensors of shape (tokens, d_inner).

    Mamba-1 keeps x, z, the output of x_proj, and the states of every 64th position in fp32. Mamba-2 keeps the output of
    in_proj. mamba-ssm also keeps the outputs of the scan and of SSD.
    """
    monkeypatch.undo()  # restores the library's block sizes
    whole = kept(kind, WHOLES)
    parts = kept(kind, PARTS)
    assert most - 0.1 <= whole <= most and parts > whole + 2
