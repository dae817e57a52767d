"""Lists the norms' kernels: before a block of mamba-1.4b (2048 channels), of the output of a mixer of mamba2-1.3b
(4096), and of rows of 16,384; in bf16, on an fp32 residual stream."""

from importlib import import_module
from typing import Any

from benchmarks.kernels import Kernel
from mamba_fsdp.ops.norm.triton import ROWS, blocks

TYPES = {
    name: type
    for type, names in {
        "*bf16": "OUT Z GRAD GRAD_X GRAD_Z NORMED",
        "*fp32": "WEIGHT SCALE SUMS RESIDUAL TOTAL GRAD_TOTAL GRAD_RESIDUAL",
        "fp32": "eps",
        "i32": "channels z_row grad_z_row rows",
    }.items()
    for name in names.split()
}
ABSENT: dict[str, Any] = dict.fromkeys(
    "RESIDUAL TOTAL Z GRAD_TOTAL GRAD_RESIDUAL GRAD_Z NORMED".split()
)
PLAIN = ABSENT | {"z_row": 0, "grad_z_row": 0, "GATE_LAST": False}
FORWARD = "X WEIGHT OUT SCALE eps channels"
BACKWARD = "GRAD X WEIGHT SCALE GRAD_X SUMS rows channels"


def kernel(
    name: str, function: str, channels: int, arguments: str, x: str, **bounds: Any
) -> Kernel:
    """Returns a Kernel. x: the type of X."""
    constants = dict(blocks(channels))
    warps = constants.pop("num_warps")
    types = TYPES | {"X": x}
    signature = {argument: types[argument] for argument in arguments.split()}
    of_kernel = FORWARD + " RESIDUAL TOTAL Z z_row"
    if function == "norm_back":
        constants["ROWS"] = ROWS
        of_kernel = BACKWARD + " GRAD_TOTAL GRAD_RESIDUAL Z GRAD_Z NORMED z_row grad_z_row"
    for absent in {*of_kernel.split(), "GATE_LAST"} - signature.keys():
        constants[absent] = PLAIN[absent]
    return Kernel(
        f"{name}, {channels} channels",
        lambda: getattr(import_module("mamba_fsdp.ops.norm.triton_kernels"), function),
        signature,
        constants,
        elements=channels,
        warps=warps,
        aligned=signature.keys() - {"eps", "rows"},
        **bounds,
    )


SUM = FORWARD + " RESIDUAL TOTAL"
SUM_BACK = BACKWARD + " GRAD_TOTAL GRAD_RESIDUAL"
GATED = FORWARD + " Z z_row"
GATED_BACK = BACKWARD + " Z GRAD_Z NORMED z_row grad_z_row"
KERNELS = [
    kernel("sum", "norm", 2048, SUM, "*bf16", bytes=16.5, registers=40, instructions=28),
    kernel(
        "sum, back",
        "norm_back",
        2048,
        SUM_BACK,
        "*fp32",
        bytes=16.5,
        registers=80,
        instructions=24.5,
    ),
    kernel("gated", "norm", 4096, GATED, "*bf16", bytes=10.5, registers=40, instructions=34),
    kernel(
        "gated, back",
        "norm_back",
        4096,
        GATED_BACK,
        "*bf16",
        bytes=12.5,
        registers=128,
        instructions=41.5,
    ),
    # 1,024 threads of 16 channels have 64 registers each, which are too few.
    kernel(
        "sum, back",
        "norm_back",
        16384,
        SUM_BACK,
        "*fp32",
        bytes=16.5,
        registers=64,
        instructions=34,
        stack=600,
        spills=260,
    ),
    kernel(
        "gated, back",
        "norm_back",
        16384,
        GATED_BACK,
        "*bf16",
        bytes=12.5,
        registers=64,
        instructions=52,
        stack=500,
        spills=220,
    ),
]
