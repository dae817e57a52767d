"""The selective scan's kernels in a layer of mamba-1.4b (d_inner 4096, d_state 16, bf16), each row in one segment."""

from importlib import import_module

from benchmarks.kernels import Kernel

D_STATE = 16
CHANNELS = 32
CHUNK = 64
TYPES = {
    name: type
    for type, names in {
        "*bf16": "u dt B C z out grad_out grad_u grad_dt grad_z",
        "*fp32": "A D bias state ends totals scratch entries last grad_last grad_A grad_BC grad_D grad_bias "
        "grad_state",
        "*i64": "seq_idx",
        "i32": "u_row dt_row B_row C_row z_row grad_row grad_z_row length channels states segment_chunks",
    }.items()
    for name in names.split()
}
ODD = {"length", "states", "segment_chunks"}  # what need not be divisible by 16
SIZES = dict(DOCUMENTS=False, EVEN=True, N=D_STATE, CHANNELS=CHANNELS, CHUNK=CHUNK)
SWEEP = SIZES | dict(CUT=False)


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


LOCAL = "u dt A z B bias seq_idx ends totals u_row dt_row z_row B_row length channels states segment_chunks"
FORWARD = (
    "u dt A B C D z bias seq_idx state ends totals out entries last u_row dt_row z_row B_row C_row length "
    "channels states segment_chunks"
)
BACKWARD = (
    "grad_out grad_last u dt A B C D z bias seq_idx entries ends totals scratch grad_u grad_dt grad_A "
    "grad_BC grad_D grad_z grad_bias grad_state out grad_row u_row dt_row z_row B_row C_row grad_z_row length "
    "channels states segment_chunks"
)
KERNELS = [
    kernel(
        "forward",
        "forward",
        FORWARD,
        SWEEP | dict(KEEP=True),
        4,
        trips=CHUNK // 4,
        registers=168,
        instructions=13,
    ),
    kernel(
        "forward with documents",
        "forward",
        FORWARD,
        SWEEP | dict(KEEP=True, DOCUMENTS=True),
        4,
        trips=CHUNK // 4,
        registers=168,
        instructions=14,
    ),
    kernel(
        "forward with masks",
        "forward",
        FORWARD,
        SWEEP | dict(KEEP=True, EVEN=False),
        4,
        stack=16,  # outside of the loops
        trips=CHUNK // 4,
        registers=168,
        instructions=15,
    ),
    kernel(
        "backward",
        "backward",
        BACKWARD,
        SWEEP,
        2,
        trips=CHUNK // 2,
        instructions=39,
    ),
    kernel(
        "backward with documents",
        "backward",
        BACKWARD,
        SWEEP | dict(DOCUMENTS=True),
        2,
        trips=CHUNK // 2,
        instructions=40,
    ),
    kernel(
        "local",
        "local",
        LOCAL,
        SIZES | dict(REVERSE=False),
        4,
        instructions=9,
    ),
    kernel(
        "local, back",
        "local",
        LOCAL,
        SIZES | dict(REVERSE=True),
        4,
        instructions=10,
    ),
]
