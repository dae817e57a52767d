"""Lists the selective scan's kernels in a layer of mamba-1.4b (d_inner 4096, d_state 16, bf16), each row in one
segment."""

from importlib import import_module

from benchmarks.kernels import Kernel

D_STATE = 16
CHANNELS = 32
CHUNK = 64
TYPES = {
    name: type
    for type, names in {
        "*bf16": "u dt z out grad_out grad_u grad_dt grad_z",
        "*fp32": "A D bias state BC ends totals scratch entries last grad_last grad_A grad_BC grad_D grad_bias "
        "grad_state",
        "*i32": "starts",
        "i32": "u_row dt_row z_row grad_row grad_z_row length channels states segment_chunks",
    }.items()
    for name in names.split()
}
ODD = {"length", "states", "segment_chunks"}  # what need not be divisible by 16
SIZES = dict(CUT=False, EVEN=True, N=D_STATE, CHANNELS=CHANNELS, CHUNK=CHUNK)
OUT = SIZES | dict(KEEP=True, LOCAL=False, REVERSE=False)
LOCAL = SIZES | dict(KEEP=False, LOCAL=True)


def kernel(name, function, arguments, constants, tokens, **more):
    signature = {argument: TYPES[argument] for argument in arguments.split()}
    return Kernel(
        name,
        lambda: getattr(import_module("mamba_fsdp.ops.scan.triton_kernels"), function),
        signature,
        constants,
        elements=tokens * CHANNELS * D_STATE,
        aligned=signature.keys() - ODD,
        **more,
    )


FORWARD = (
    "u dt A BC D z bias starts state ends totals out entries last u_row dt_row z_row length channels states "
    "segment_chunks"
)
BACKWARD = (
    "grad_out grad_last u dt A BC D z bias starts entries ends totals scratch grad_u grad_dt grad_A "
    "grad_BC grad_D grad_z grad_bias grad_state out grad_row u_row dt_row z_row grad_z_row length "
    "channels states segment_chunks"
)
KERNELS = [
    kernel("forward", "sweep", FORWARD, OUT, 4, trips=CHUNK // 4, instructions=13),
    kernel(
        "forward with masks",
        "sweep",
        FORWARD,
        OUT | dict(EVEN=False),
        4,
        stack=32,  # outside of the loops
        trips=CHUNK // 4,
        instructions=15,
    ),
    # What it keeps from tile to tile waits on the stack while it goes through a chunk.
    kernel(
        "backward",
        "backward",
        BACKWARD,
        SIZES,
        4,
        stack=600,
        spills=60,
        trips=CHUNK // 4,
        instructions=42,
    ),
    kernel(
        "backward with masks",
        "backward",
        BACKWARD,
        SIZES | dict(EVEN=False),
        4,
        stack=700,
        spills=80,
        trips=CHUNK // 4,
        instructions=45,
    ),
    kernel("local", "sweep", FORWARD, LOCAL | dict(REVERSE=False), 4, instructions=9),
    kernel("local, back", "sweep", FORWARD, LOCAL | dict(REVERSE=True), 4, instructions=10),
]
