"""mamba-ssm's own MambaLMHeadModel on a CPU, in a process of its own.

    python mamba_ssm_oracle.py FOLDER < REQUEST > ANSWER

FOLDER is mamba_ssm_install's. REQUEST and ANSWER are files of torch.save. A request is a dict of fields of MambaConfig
("config"), a state dict ("state", or None for the reference's own initial values) and "tokens" (batch, length); the
answer one of "state", "logits", "loss" (mean over all next tokens) and "gradients".

The package's kernels are replaced by its own reference functions. Triton and transformers, which it imports but does
not need for that, are stand-ins, so neither has to be installed, nor in a version that suits.
"""

import io
import sys
import types
from unittest.mock import MagicMock

import torch
import torch.nn.functional as F

STAND_INS = (
    "triton",
    "triton.language",
    "transformers",
    "transformers.generation",
    "transformers.utils",
    "transformers.utils.hub",
    "selective_scan_cuda",
)


def reference_model_class():
    sys.path.insert(0, sys.argv[1])
    for name in STAND_INS:
        sys.modules[name] = MagicMock(__version__="3.0.0")
    triton = sys.modules[
        "triton"
    ]  # the package looks into its kernels' configurations when it is imported
    triton.Config = lambda sizes, num_warps=4, **_: types.SimpleNamespace(
        kwargs=sizes, num_warps=num_warps
    )
    triton.autotune = lambda configs, **_: lambda kernel: types.SimpleNamespace(configs=configs)
    sys.modules["huggingface_hub"] = types.SimpleNamespace(PyTorchModelHubMixin=object)
    from mamba_ssm.models import mixer_seq_simple
    from mamba_ssm.modules import mamba2, mamba_simple
    from mamba_ssm.ops import selective_scan_interface as scan
    from mamba_ssm.ops.triton import layer_norm, layernorm_gated, ssd_combined

    def rms_norm(
        x, weight, bias, eps, **_
    ):  # called without a residual here, as fused_add_norm is off
        return layer_norm.rms_norm_ref(x, weight, bias, eps=eps, upcast=True)

    def ssd(x, dt, A, B, C, chunk_size, D, z, dt_bias, dt_softplus, **_):
        return ssd_combined.ssd_selective_scan(
            x, dt, A, B, C, D=D, z=z, dt_bias=dt_bias, dt_softplus=dt_softplus
        )

    scan.selective_scan_fn = mamba_simple.selective_scan_fn = scan.selective_scan_ref
    layer_norm.rms_norm_fn = rms_norm
    layernorm_gated.rmsnorm_fn = layernorm_gated.rms_norm_ref
    mamba2.mamba_chunk_scan_combined = ssd
    return mixer_seq_simple.MambaLMHeadModel, mixer_seq_simple.MambaConfig


def main():
    model_class, config_class = reference_model_class()
    request = torch.load(io.BytesIO(sys.stdin.buffer.read()), weights_only=True)
    torch.manual_seed(0)
    model = model_class(config_class(**request["config"], fused_add_norm=False))
    if request["state"]:
        model.load_state_dict(request["state"])
    tokens = request["tokens"]
    logits = model(tokens).logits
    loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    answer = {
        "state": {name: value.detach() for name, value in model.named_parameters()},
        "logits": logits.detach(),
        "loss": loss.detach(),
        "gradients": {name: value.grad for name, value in model.named_parameters()},
    }
    torch.save(answer, sys.stdout.buffer)


main()
