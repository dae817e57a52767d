"""mamba-ssm's own Triton kernels for Mamba-2, in the interpreter: whole models by the backends fused and triton, chosen
and called as a run does on a GPU, give the loss and the gradients of the reference one.

causal-conv1d has no kernels in Triton: its functions are stood in for.
"""

import sys
import types
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from compare import assert_like

from config.model_config import ModelConfig
from mamba_fsdp.model.init import initial_value
from mamba_fsdp.model.lm import MambaLM
from mamba_fsdp.model.spec import operator_uses, parameters
from mamba_fsdp.ops.backends import OPERATORS, REFERENCE, resolve_backends
from tests.support.mamba_ssm_install import mamba_ssm_folder

pytestmark = pytest.mark.slow
CONFIG = ModelConfig(
    d_model=16, n_layer=1, layers="mamba2", vocab_size=64, d_state=16, headdim=4, chunk_size=16
)
DOCUMENTS = torch.tensor([4] * 9 + [5] * 14 + [6] * 11)[None]


def conv_forward(x, weight, bias, seq_idx, initial_states, out, silu):
    """x (batch, channels, length), seq_idx (batch, length) or None."""
    total = bias[:, None].float()
    width = weight.shape[1]
    for back in range(width):
        shifted = F.pad(x.float(), (back, 0))[..., : x.shape[2]]
        if seq_idx is not None:
            shifted = (
                shifted * (F.pad(seq_idx, (back, 0), value=-1)[:, : x.shape[2]] == seq_idx)[:, None]
            )
        total = total + shifted * weight[:, width - 1 - back, None].float()
    return (F.silu(total) if silu else total).to(x.dtype)


def conv_backward(
    x, weight, bias, gradient, seq_idx, initial_states, last_gradient, out, want_initial, silu
):
    with torch.enable_grad():
        inputs = [tensor.detach().requires_grad_() for tensor in (x, weight, bias)]
        found = torch.autograd.grad(
            conv_forward(*inputs, seq_idx, None, None, silu), inputs, gradient
        )
    if out is not None:
        out.copy_(found[0])
        found = out, *found[1:]
    return *found, None


@pytest.fixture(scope="module", autouse=True)
def interpreted_mamba_ssm():
    """mamba-ssm's Python modules with one configuration of each kernel, since the autotuner would time on a GPU."""

    def module(name, **content):
        made = types.ModuleType(name)
        vars(made).update(content)
        patch.setitem(sys.modules, name, made)
        return made

    folder = mamba_ssm_folder()
    before = set(sys.modules)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MAMBA_DETERMINISTIC", "1")
        patch.setattr(torch.cuda, "device", lambda *_: nullcontext())
        patch.setattr(
            torch.cuda,
            "get_device_properties",
            lambda *_: types.SimpleNamespace(multi_processor_count=132),
        )
        patch.syspath_prepend(folder)  # for einops and packaging
        module("selective_scan_cuda")
        module("mamba_ssm", __path__=[str(folder / "mamba_ssm")])  # whose own imports transformers
        functions = dict(
            causal_conv1d_fwd_function=conv_forward,
            causal_conv1d_bwd_function=conv_backward,
            causal_conv1d_update_function=None,
        )
        module("causal_conv1d", __path__=[], causal_conv1d_update=None, causal_conv1d_fn=None)
        module("causal_conv1d.cpp_functions", **functions)
        yield
        for name in set(sys.modules) - before:
            if name.startswith(("mamba_ssm", "causal_conv1d")):
                del sys.modules[name]


def model_results(backends, dtype, seq_idx):
    """{"loss": ..., parameter: its gradient} of a fixed model on fixed tokens, on the CPU."""
    model = MambaLM(
        CONFIG, backends=backends, compute_dtype=dtype, reset_at_documents=seq_idx is not None
    )
    with torch.no_grad():
        for (name, described), parameter in zip(parameters(CONFIG).items(), model.parameters()):
            parameter.copy_(initial_value(name, described, 0))
    model.to(dtype)
    tokens = torch.randint(64, (1, 35), generator=torch.Generator().manual_seed(0))
    loss = model(tokens[:, :-1], labels=tokens[:, 1:], seq_idx=seq_idx)
    loss.backward()
    return {"loss": loss.detach()} | {
        name: parameter.grad for name, parameter in model.named_parameters()
    }


@pytest.mark.parametrize("seq_idx", [None, DOCUMENTS], ids=["one document", "seq_idx"])
@pytest.mark.parametrize("backend", ["fused", "triton"])
def test_a_model_trains_the_same(backend, seq_idx):
    if backend not in OPERATORS["ssd"]:
        pytest.skip(f"SSD has no backend {backend}")
    backends = resolve_backends(
        backend, "cuda", operator_uses(CONFIG, torch.float32, seq_idx is not None)
    ).backends
    assert backends["ssd"] == backend
    got = model_results(backends, torch.float32, seq_idx)
    assert_like(got, model_results(REFERENCE, torch.float64, seq_idx), 5e-6)
