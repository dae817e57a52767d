"""Tests our calls of mamba-ssm's Mamba-2 kernels on a CPU. The reference functions of mamba-ssm replace its kernels.

test_fused.py runs this program in a separate process. The program fails if outputs or gradients differ from those of
the reference backend.

    python fused_on_cpu.py FOLDER_WITH_MAMBA_SSM
"""

import functools
import inspect
import sys
import types
from pathlib import Path

sys.path[:0] = [sys.argv[1], str(Path(__file__).resolve().parents[2])]
# The __init__.py of mamba_ssm is not run, because it imports all other modules of the package.
package = types.ModuleType("mamba_ssm")
package.__path__ = [f"{sys.argv[1]}/mamba_ssm"]
sys.modules["mamba_ssm"] = package
sys.modules["selective_scan_cuda"] = types.ModuleType("selective_scan_cuda")

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from mamba_ssm.ops import selective_scan_interface  # noqa: E402
from mamba_ssm.ops.triton import layernorm_gated, ssd_combined  # noqa: E402

from mamba_fsdp.model.config import ModelConfig  # noqa: E402
from mamba_fsdp.model.layers import Mamba2  # noqa: E402
from mamba_fsdp.ops.backends import REFERENCE  # noqa: E402
from mamba_fsdp.ops.ssd import ssd  # noqa: E402
from tests.support.compare import assert_like, evaluate  # noqa: E402
from tests.support.definitions import ssd_values  # noqa: E402

calls = []


def causal_conv1d_reference(x, weight, bias, activation):
    assert weight.dim() == 2 and activation == "silu"
    out = F.conv1d(x, weight[:, None], bias, padding=weight.shape[1] - 1, groups=weight.shape[0])
    return F.silu(out[..., : x.shape[2]])


def answered_by(reference, kernel, sequences, ignored):
    """Returns a replacement for `kernel` that takes the same arguments and runs `reference` for each document. All rows
    must have the same documents.

    sequences: the names of the arguments whose second dimension is the position.
    ignored: the names of the arguments that `reference` does not have.
    """
    signature = inspect.signature(kernel)

    @functools.wraps(kernel)
    def stand_in(*positional, **keywords):
        call = signature.bind(*positional, **keywords)
        arguments = dict(call.arguments)
        seq_idx = arguments.pop("seq_idx", None)
        calls.append(kernel.__name__)
        for name in ignored:
            assert not arguments.pop(name, None), name
        if seq_idx is None:
            return reference(**arguments)
        assert seq_idx.dtype == torch.int32 and seq_idx.is_contiguous() and not seq_idx[:, 0].any()
        outs = []
        for document in seq_idx[0].unique():
            piece = seq_idx[0] == document
            outs.append(
                reference(**{n: v[:, piece] if n in sequences else v for n, v in arguments.items()})
            )
        return torch.cat(outs, dim=1)

    return stand_in


def scan_reference(x, dt, A, B, C, chunk_size, **rest):
    return ssd_combined.ssd_selective_scan(x, dt, A, B, C, **rest)


def mixer_reference(**given):
    """Calls mamba-ssm's reference of the whole mixer. Asserts that matrices and convolution have the dtype of the
    activations, and that the parameters of the recurrence are in float32."""
    of_products = {given[name].dtype for name in ("conv1d_weight", "conv1d_bias", "outproj_weight")}
    assert of_products == {given["zxbcdt"].dtype}
    assert {given[name].dtype for name in ("dt_bias", "A", "D")} == {torch.float32}
    return ssd_combined.mamba_split_conv1d_scan_ref(**given)


selective_scan_interface.selective_scan_fn = selective_scan_interface.selective_scan_ref
ssd_combined.causal_conv1d_fn = causal_conv1d_reference
ssd_combined.rmsnorm_fn = layernorm_gated.rms_norm_ref
ssd_combined.mamba_chunk_scan_combined = answered_by(
    scan_reference,
    ssd_combined.mamba_chunk_scan_combined,
    ("x", "dt", "B", "C"),
    ("initial_states", "return_final_states"),
)
ssd_combined.mamba_split_conv1d_scan_combined = answered_by(
    mixer_reference,
    ssd_combined.mamba_split_conv1d_scan_combined,
    ("zxbcdt",),
    (),
)


def compare(operator, tensors, **rest):
    """Compares outputs and gradients of the two backends, without documents and with document ids that begin at 4."""
    for seq_idx in (None, torch.tensor([4, 4, 4, 5, 5, 6, 6, 6, 6, 6, 6]).expand(2, 11)):
        how = {**rest, "seq_idx": seq_idx}
        reference, fused = (
            evaluate(operator, tensors, **how, backend=backend)
            for backend in ("reference", "fused")
        )
        assert_like(fused, reference, 1e-4)
        assert all(fused[name].dtype == reference[name].dtype for name in fused)


def mixer(seq_idx, backend, x, **weights):
    """Applies a Mamba-2 layer. The backend `fused` computes it in a single call of a kernel."""
    config = ModelConfig(d_model=8, headdim=4, d_state=8, chunk_size=16)
    layer = Mamba2(config, REFERENCE | ({"mamba2": "fused"} if backend == "fused" else {}))
    weights = {name.replace("__", "."): value for name, value in weights.items()}
    return torch.func.functional_call(layer, weights, (x, seq_idx))


torch.manual_seed(0)
heads, headdim, d_state, d_inner, d_model = 4, 4, 8, 16, 8
for groups in (1, 2):
    values = ssd_values(torch.randn, 2, 11, heads, headdim, groups, d_state)
    compare(ssd, values, chunk_size=16)
channels = d_inner + 2 * d_state
of_layer = dict(
    x=torch.randn(2, 11, d_model),
    in_proj__weight=torch.randn(d_inner + channels + heads, d_model) / 3,
    conv1d__weight=torch.randn(channels, 1, 4),
    conv1d__bias=torch.randn(channels),
    dt_bias=torch.randn(heads),
    A_log=torch.randn(heads),
    D=torch.randn(heads),
    norm__weight=torch.randn(d_inner),
    out_proj__weight=torch.randn(d_model, d_inner),
)
compare(mixer, of_layer)
assert calls == 4 * ["mamba_chunk_scan_combined"] + 2 * ["mamba_split_conv1d_scan_combined"], calls
half = of_layer | {"x": of_layer["x"].bfloat16()}
assert mixer(None, "fused", **half).dtype == torch.bfloat16
