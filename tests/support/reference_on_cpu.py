"""Runs mamba-ssm's own language model on a CPU. The reference functions of mamba-ssm replace its kernels.

test_state_spaces.py runs this program in a separate process. The program loads each model folder in the way that users
of mamba-ssm do, computes the logits, the mean loss of all next tokens and its gradients, and saves the model again.

python reference_on_cpu.py FOLDER_WITH_MAMBA_SSM FOLDER_OF_MODELS
"""

import sys
import types
from pathlib import Path

sys.path.insert(0, sys.argv[1])
sys.modules["selective_scan_cuda"] = types.ModuleType("selective_scan_cuda")

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from mamba_ssm.models.mixer_seq_simple import MambaLMHeadModel  # noqa: E402
from mamba_ssm.modules import mamba2, mamba_simple  # noqa: E402
from mamba_ssm.ops.selective_scan_interface import selective_scan_ref  # noqa: E402
from mamba_ssm.ops.triton import layer_norm, layernorm_gated, ssd_combined  # noqa: E402


def plain_norm(x, weight, bias, residual=None, eps=1e-6, prenorm=False, **ignored):
    return layer_norm.rms_norm_ref(
        x, weight, bias, residual=residual, eps=eps, prenorm=prenorm, upcast=True
    )


def plain_gated_norm(x, weight, bias, z=None, eps=1e-6, group_size=None, norm_before_gate=True):
    return layernorm_gated.rms_norm_ref(
        x, weight, bias, z=z, eps=eps, group_size=group_size, norm_before_gate=norm_before_gate
    )


def plain_scan(
    x, dt, A, B, C, chunk_size, D=None, z=None, dt_bias=None, dt_softplus=False, **ignored
):
    return ssd_combined.ssd_chunk_scan_combined_ref(
        x, dt, A, B, C, x.shape[1], D=D, z=z, dt_bias=dt_bias, dt_softplus=dt_softplus
    )


mamba_simple.selective_scan_fn = selective_scan_ref
mamba2.mamba_chunk_scan_combined = plain_scan
layer_norm.rms_norm_fn = plain_norm
layernorm_gated.rmsnorm_fn = plain_gated_norm

for folder in Path(sys.argv[2]).iterdir():
    model = MambaLMHeadModel.from_pretrained(
        str(folder / "exported"), device="cpu", dtype=torch.float32
    ).eval()
    # Loading is strict, and the output confirms it.
    model.load_state_dict(torch.load(folder / "exported" / "pytorch_model.bin", weights_only=True))
    for module in model.modules():
        for switch in ("use_fast_path", "use_mem_eff_path", "fused_add_norm"):
            if hasattr(module, switch):
                setattr(module, switch, False)
    tokens = torch.load(folder / "tokens.pt", weights_only=True)
    logits = model(tokens).logits
    loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    answer = {"logits": logits.detach(), "loss": loss.detach(), "gradients": gradients}
    torch.save(answer, folder / "answer.pt")
    model.save_pretrained(str(folder / "saved"))
