"""mamba-ssm's Triton kernels as they run in a layer of mamba2-2.7b, and its RMSNorm in one of mamba-1.4b, in bf16, for
the table beside ours.

    PYTHONPATH=FOLDER_OF_A_TRITON python -m benchmarks.kernels.reference_triton CC ...

prints one line of JSON, a `report`, for each kernel and architecture. mamba-ssm's own Python runs on tensors without
content, 8 x 2048 tokens in chunks of 256, and where it would launch a kernel, the launch is noted: what the compiler
knows of the arguments, the number of programs, and the bytes of all its tensors as allocated, each counted once. What
torch adds up between the kernels is not in the table. mamba-ssm's autotuner would time some configurations on the GPU;
CHOSEN names one of them, for the kernels with the most instructions the one that has the fewest on sm_90. Since the
programs are short, what stands outside their loops is counted too.
"""

import inspect
import math
import sys
import types
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch

from benchmarks.kernels import Kernel
from benchmarks.kernels.compiler import Compiled, assembly, count, of_launch
from benchmarks.kernels.machine_code import loops, resources, whole
from benchmarks.kernels.reference import report, sources

BATCH = 8
LENGTH = 2048
CHUNK = 256
SMS = 132
# channels of the norm behind a sum
HEADS = 80
HEADDIM = 64
D_STATE = 128
ADDED = 2048
TOKENS = BATCH * LENGTH


@dataclass
class Chosen:
    """How a kernel is shown. blocks: the configuration; trips(arguments): of the loop in a program, on average."""

    name: str
    blocks: dict[str, int]
    trips: Callable[[dict[str, Any]], float]
    mark: tuple[str, int] | None = None


def of_chunk(block):
    return lambda a: CHUNK / a[block]


def causal(a):
    """Blocks of columns up to the diagonal, or from it on, for the average block of rows."""
    rows = a["BLOCK_SIZE_M"]
    columns = a["BLOCK_SIZE_K"] if "stride_cb_csize_k" in a else a["BLOCK_SIZE_N"]
    return sum(math.ceil((m + 1) * rows / columns) for m in range(CHUNK // rows)) * rows / CHUNK


def of_heads(a):
    return HEADS / math.ceil(HEADS / a["nheads_per_program"])


def below_diagonal(a):
    """The heads, in those of its blocks that are not left out."""
    m = a["BLOCK_SIZE_M"]
    n = a["BLOCK_SIZE_N"]
    kept = [column * n < (row + 1) * m for row in range(CHUNK // m) for column in range(CHUNK // n)]
    return of_heads(a) * sum(kept) / len(kept)


def once(a):
    return 1


def tile(*sizes, k="K"):
    return dict(zip(("BLOCK_SIZE_M", "BLOCK_SIZE_N", f"BLOCK_SIZE_{k}"), sizes))


WARPS = {"num_warps": 4}
EXP = ("MUFU.EX2", 1)
CHOSEN = {  # by module and function
    "ssd_chunk_state._chunk_cumsum_fwd_kernel": Chosen("steps", {"BLOCK_SIZE_H": 4}, once),
    "ssd_chunk_state._chunk_state_fwd_kernel": Chosen(
        "chunk states", tile(64, 128, 32), of_chunk("BLOCK_SIZE_K")
    ),
    "ssd_state_passing._state_passing_fwd_kernel": Chosen(
        "passing", {"BLOCK_SIZE": 512}, lambda a: a["nchunks"], EXP
    ),
    "ssd_bmm._bmm_chunk_fwd_kernel": Chosen(
        "C B", tile(128, 128, 32), lambda a: D_STATE / a["BLOCK_SIZE_K"]
    ),
    "ssd_chunk_scan._chunk_scan_fwd_kernel": Chosen("chunk scan", tile(128, 64, 32), causal),
    "ssd_chunk_scan._chunk_scan_bwd_dstates_kernel": Chosen(
        "to states", tile(64, 128, 32), of_chunk("BLOCK_SIZE_K")
    ),
    "ssd_state_passing._state_passing_bwd_kernel": Chosen(
        "passing back", {"BLOCK_SIZE": 512}, lambda a: a["nchunks"] - 1, EXP
    ),
    "ssd_combined._chunk_scan_chunk_state_bwd_dx_kernel": Chosen("to x", tile(128, 64, 32), causal),
    "ssd_chunk_state._chunk_state_bwd_db_kernel": Chosen("to B", tile(64, 128), of_heads),
    "ssd_chunk_scan._chunk_scan_bwd_dc_kernel": Chosen("to C", tile(64, 128), of_heads),
    "ssd_chunk_scan._chunk_scan_bwd_dcb_kernel": Chosen("to C B", tile(64, 64), below_diagonal),
    "ssd_bmm._bmm_chunk_bwd_kernel": Chosen(
        "C B back", tile(128, 128, 32, k="CS"), of_chunk("BLOCK_SIZE_CS")
    ),
    "ssd_chunk_scan._chunk_scan_bwd_ddAcs_stable_kernel": Chosen("to decays", tile(64, 64), causal),
    "ssd_chunk_state._chunk_cumsum_bwd_kernel": Chosen("to steps", {"BLOCK_SIZE_H": 4}, once),
    "layernorm_gated._layer_norm_fwd_1pass_kernel": Chosen("norm, gate", {}, once),
    "layernorm_gated._layer_norm_bwd_kernel": Chosen(
        "norm, gate, back", {}, lambda a: a["rows_per_program"]
    ),
    "layer_norm._layer_norm_fwd_1pass_kernel": Chosen("norm, sum", WARPS, once),
    "layer_norm._layer_norm_bwd_kernel": Chosen(
        "norm, sum, back", WARPS, lambda a: a["rows_per_program"]
    ),
}


class Noted:
    """Stands in for a kernel and its autotuner: [grid](arguments) notes the launch in `launches`."""

    launches: list[tuple[Kernel, float]] = []  # with the trips of a program's loop

    def __init__(self, kernel, configs=(), heuristics=()):
        self.kernel = kernel
        self.configs = configs
        self.heuristics = list(heuristics)
        self.chosen = CHOSEN.get(f"{kernel.fn.__module__.rpartition('.')[2]}.{kernel.fn.__name__}")
        self.best_config = next(
            (config for config in configs if self.chosen and self.fits(config)), None
        )

    def fits(self, config):
        values = {**config.kwargs, "num_warps": config.num_warps}
        return all(values.get(name) == size for name, size in self.chosen.blocks.items())

    def __getitem__(self, grid):
        return lambda *positional, **named: self.note(grid, positional, named)

    def note(self, grid, positional, named):
        parameters = inspect.signature(self.kernel.fn).parameters
        config = self.best_config
        warps, stages = (
            (config.num_warps, config.num_stages) if config else (named.pop("num_warps"), 3)
        )
        values = dict(zip(parameters, positional)) | named | (config.kwargs if config else {})
        for name, value in self.heuristics:
            values[name] = value(values)
        tensors = [value for value in values.values() if isinstance(value, torch.Tensor)]
        channels = values.get("N", HEADS * HEADDIM)
        trips = self.chosen.trips(values)
        elements = TOKENS * channels / math.prod(grid(values) if callable(grid) else grid) / trips
        kernel = Kernel(
            self.chosen.name,
            lambda: self.kernel,
            **of_launch(parameters, values),
            elements=elements,
            bytes_per_token=sum(tensor.numel() * tensor.element_size() for tensor in tensors)
            / TOKENS,
            per_token=channels,
            warps=warps,
            stages=stages,
            mark=self.chosen.mark,
        )
        Noted.launches.append((kernel, trips))


def heuristics(values):
    """Stands in for triton.heuristics, as Noted does for triton.autotune."""

    def note(kernel):
        noted = kernel if isinstance(kernel, Noted) else Noted(kernel)
        return Noted(noted.kernel, noted.configs, [*values.items(), *noted.heuristics])

    return note


def autotune(configs, **_):
    def note(kernel):
        return (
            Noted(kernel.kernel, configs, kernel.heuristics)
            if isinstance(kernel, Noted)
            else Noted(kernel, configs)
        )

    return note


def launches() -> list[tuple[Kernel, float]]:
    """What a layer launches, forward and backward, in order. A kernel that runs in both passes is named in both."""
    import triton

    for name, more in {
        "mamba_ssm": {"__path__": [str(sources() / "mamba_ssm")]},
        "selective_scan_cuda": {},
    }.items():
        sys.modules[name] = types.ModuleType(name)
        vars(sys.modules[name]).update(more)
    with (
        patch.object(triton, "autotune", autotune),
        patch.object(triton, "heuristics", heuristics),
        patch.object(torch.cuda, "device", lambda *_: nullcontext()),
        patch.object(
            torch.cuda,
            "get_device_properties",
            lambda *_: types.SimpleNamespace(multi_processor_count=SMS),
        ),
    ):
        from mamba_ssm.ops.triton import layer_norm, layernorm_gated, ssd_combined

        run(ssd_combined, layer_norm, layernorm_gated)
    return Noted.launches


def run(ssd, norm, gated):
    bf16 = torch.bfloat16
    inner = HEADS * HEADDIM

    def empty(*shape, dtype=torch.float32):
        return torch.empty(*shape, dtype=dtype, device="meta")

    def stream(channels, dtype=bf16):
        return empty(TOKENS, channels, dtype=dtype)

    projected = empty(BATCH, LENGTH, 2 * inner + 2 * D_STATE + HEADS, dtype=bf16)
    z = projected[..., :inner].flatten(0, 1)
    dt = projected[..., -HEADS:]
    x, B, C = empty(BATCH, LENGTH, inner + 2 * D_STATE, dtype=bf16).split(
        [inner, D_STATE, D_STATE], dim=-1
    )
    inputs = x.unflatten(-1, (HEADS, HEADDIM)), dt, empty(HEADS), B.unsqueeze(2), C.unsqueeze(2)
    more = dict(D=empty(HEADS), dt_bias=empty(HEADS), dt_softplus=True)
    out = ssd._mamba_chunk_scan_combined_fwd(*inputs, CHUNK, **more)[0]
    ssd._mamba_chunk_scan_combined_bwd(out, *inputs, out, CHUNK, **more)
    y = stream(inner)
    weight = empty(inner)
    options = dict(z=z, norm_before_gate=False, is_rms_norm=True)
    scale = gated._layer_norm_fwd(y, weight, None, 1e-5, **options)[2]
    gated._layer_norm_bwd(y, y, weight, None, 1e-5, None, scale, **options)
    y = stream(ADDED)
    total = stream(ADDED, torch.float32)
    weight = empty(ADDED)
    scale = norm._layer_norm_fwd(y, weight, None, 1e-5, residual=total, is_rms_norm=True)[3]
    norm._layer_norm_bwd(
        y,
        total,
        weight,
        None,
        1e-5,
        None,
        scale,
        dresidual=total,
        has_residual=True,
        is_rms_norm=True,
        x_dtype=bf16,
    )


def compiled(kernel: Kernel, trips: float, cc: int) -> Compiled:
    import triton

    try:
        made, shared = assembly(kernel, cc)
    except Exception as error:
        return Compiled(
            "mamba-ssm",
            kernel.name,
            cc,
            triton.__version__,
            0,
            0,
            0,
            0,
            0,
            [],
            error=f"{type(error).__name__}: {error}",
        )
    found = loops(made["cubin"])
    body = whole(made["cubin"])
    outside = body.instructions - sum(loop.instructions for loop in found)
    special = body.kinds.get("special", 0) - sum(loop.kinds.get("special", 0) for loop in found)
    of_program = 32 * kernel.warps / (kernel.elements * trips)
    return Compiled(
        "mamba-ssm",
        kernel.name,
        cc,
        triton.__version__,
        *resources(made["cubin"]),
        shared,
        count(kernel, found) + outside * of_program,
        count(kernel, found, "special") + special * of_program,
        found,
    )


def main(ccs: list[str]) -> None:
    for cc in map(int, ccs):
        for kernel, trips in launches():
            report(compiled(kernel, trips, cc), kernel)


if __name__ == "__main__":
    main(sys.argv[1:])
