"""On a GPU with mamba-ssm and causal-conv1d: the fused backends against the reference ones in float64, whole mixers and
their parts; and attention in bf16."""

import pytest
import torch

from config.model_config import ModelConfig
from mamba_fsdp.model.init import initial_value
from mamba_fsdp.model.layers import MIXERS
from mamba_fsdp.ops.attention import attention
from mamba_fsdp.ops.backends import OPERATORS, REFERENCE, why_unavailable

LENGTH = 300
CONFIGS = {
    "mamba1": ModelConfig(layers="mamba1", d_model=32, dt_rank=4),
    "mamba2": ModelConfig(layers="mamba2", d_model=256, d_state=128),
    "mamba2 in groups": ModelConfig(layers="mamba2", d_model=256, d_state=128, ngroups=2),
}
FUSED = {operator: "fused" for operator in OPERATORS if "fused" in OPERATORS[operator]}
# Products in float32 may run in TF32 inside the kernels, which has ten bits.
DTYPES = pytest.mark.parametrize(
    "dtype, tolerance", [(torch.float32, 5e-3), (torch.bfloat16, 3e-2)]
)
BOUNDED = pytest.mark.parametrize("bounded", [False, True])


@pytest.fixture(autouse=True, scope="module")
def fused_or_skip():
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    for operator in ("mamba1", "mamba2"):
        reason = why_unavailable(operator, "fused")
        if reason:
            pytest.skip(reason)


def boundaries():
    starts = torch.zeros(2, LENGTH, dtype=torch.int32, device="cuda")
    starts[0, [40, 41, 128, 250]] = 1
    starts[1, [200]] = 1
    return starts.cumsum(1).int() + 3


def mixer(config, backends):
    """A layer with the weights that a run begins with, in fp32."""
    layer = MIXERS[config.layers](config, backends)
    with torch.no_grad():
        for name, described in layer.kind.parameters(config).items():
            layer.get_parameter(name).copy_(initial_value(name, described, 0))
    return layer.cuda()


def results(function, wanted):
    """An output and the gradients of `wanted`, of one fixed weighted sum."""
    output = function()
    generator = torch.Generator("cuda").manual_seed(1)
    weights = torch.randn(output.shape, device="cuda", generator=generator)
    return [output, *torch.autograd.grad((output * weights).sum(), wanted)]


def assert_near(found, expected, names, tolerance):
    """By RMS errors."""
    for name, a, e in zip(names, found, expected, strict=True):
        error = (a.double() - e).square().mean().sqrt() / e.square().mean().sqrt()
        assert error <= tolerance, f"{name}: relative error {error:.1e}"


@DTYPES
@BOUNDED
@pytest.mark.parametrize("whole", [True, False], ids=["in one call", "in parts"])
@pytest.mark.parametrize("kind", CONFIGS)
def test_mixers(kind, whole, bounded, dtype, tolerance):
    """Outputs and all gradients: layout, norm groups, document boundaries."""
    config = CONFIGS[kind]
    backends = REFERENCE | FUSED
    if not whole:
        del backends["mamba1"], backends["mamba2"]
    if bounded and config.layers == "mamba1":  # whose scan keeps no documents apart
        backends["scan"] = "reference"
        backends.pop("mamba1", None)
    torch.manual_seed(0)
    x = torch.randn(2, LENGTH, config.d_model, device="cuda").to(dtype).requires_grad_()
    seq_idx = boundaries() if bounded else None
    fused = mixer(config, backends)
    exact = mixer(config, REFERENCE).double()
    exact_x = x.detach().double().requires_grad_()
    names = ["output", "x", *dict(fused.named_parameters())]
    found = results(lambda: fused(x, seq_idx), [x, *fused.parameters()])
    expected = results(lambda: exact(exact_x, seq_idx), [exact_x, *exact.parameters()])
    assert_near(found, expected, names, tolerance)


@BOUNDED
def test_attention_on_the_gpu(bounded):
    """Attention in bf16, grouped-query, is the float64 result up to bf16's rounding; documents don't leak."""
    torch.manual_seed(0)
    q, k, v = (
        torch.randn(2, 300, heads, 128, device="cuda", dtype=torch.bfloat16) for heads in (8, 2, 2)
    )
    seq_idx = boundaries() if bounded else None
    out = attention(q, k, v, seq_idx=seq_idx)
    exact = attention(q.double(), k.double(), v.double(), seq_idx=seq_idx)
    assert (out - exact).norm() <= 1e-2 * exact.norm()
    if bounded:
        v[0, :250] += 5
        assert torch.equal(attention(q, k, v, seq_idx=seq_idx)[0, 250:], out[0, 250:])
