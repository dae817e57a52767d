"""The SSD's kernels in a layer of mamba2-2.7b (80 heads of 64 channels, d_state 128, one group, bf16), each row in one
segment, chunks of 32."""

from importlib import import_module

from benchmarks.kernels import Kernel

HEADS = 80
HEADDIM = 64
D_STATE = 128
Q = 32
W = 2 * Q
TYPES = {
    name: type
    for type, names in {
        "*bf16": "x grad_y dt B C entering leaving states out grad_dt",
        "*fp32": "A D bias steps first ends end_decays last grad_B grad_C flows totals",
        "*i32": "seq_idx",
        "i32": "x_batch grad_y_batch b_batch c_batch dt_batch dt_row length heads segments per_segment",
    }.items()
    for name in names.split()
}
ODD = {"segments", "per_segment", "length"}  # what need not be divisible by 16
SIZES = dict(
    HEADS=HEADS,
    SHARE=HEADS,
    HEADDIM=HEADDIM,
    D_STATE=D_STATE,
    N=D_STATE,
    WIDE=False,
    X_ROW=HEADS * HEADDIM + 2 * D_STATE,
    B_ROW=HEADS * HEADDIM + 2 * D_STATE,
    C_ROW=HEADS * HEADDIM + 2 * D_STATE,
)


def kernel(name, function, arguments, constants, elements, **more):
    signature = {argument: TYPES[argument] for argument in arguments.split()}
    return Kernel(
        name,
        lambda: getattr(import_module("mamba_fsdp.ops.ssd.triton_kernels"), function),
        signature,
        constants,
        elements=elements,
        aligned=signature.keys() - ODD,
        **more,
    )


# At most, of instructions for an element, by the channels of a program:
BOUNDS = {
    "forward": {16: 110, 32: 112, 64: 62},
    "forward with documents": {16: 123, 32: 128, 64: 68},
    "states": {16: 56, 32: 56, 64: 34},
    "back": {16: 136, 32: 136, 64: 78},
    "local": {16: 43, 32: 38, 64: 22},
    "local back": {16: 43, 32: 38, 64: 22},
}
GRADIENTS = "grad_y x B C steps seq_idx grad_B grad_C flows"
STRIDES = "grad_y_batch x_batch b_batch c_batch length"
SWEEP = "x B C D steps {}ends end_decays {}last x_batch b_batch c_batch length segments per_segment"


def sweeps(P, warps=4, **more):
    """The sweeps with P channels in a program; `local`: before the others, where a row has several segments."""
    sizes = SIZES | dict(Q=Q, P=P, TILES=HEADDIM // P, first=None, LOCAL=False, REVERSE=False)
    back = sizes | dict(REVERSE=True, X_ROW=HEADS * HEADDIM)

    def sweep(title, arguments, constants):
        return kernel(
            f"{title}, {P} channels",
            "sweep",
            SWEEP.format(*arguments),
            constants,
            Q * P,
            warps=warps,
            instructions=BOUNDS[title][P],
            registers=128 if constants["LOCAL"] else 255,
            **more,
        )

    return [
        sweep(
            "forward",
            ("", "out "),
            sizes | dict(seq_idx=None, states=None),
        ),
        sweep(
            "forward with documents",
            ("seq_idx ", "out "),
            sizes | dict(states=None),
        ),
        sweep("states", ("seq_idx ", "states "), sizes | dict(out=None)),
        sweep("back", ("seq_idx ", "states out "), back),
        *(
            sweep(
                title,
                ("seq_idx ", "out "),
                of | dict(states=None, LOCAL=True),
            )
            for title, of in (("local", sizes), ("local back", back))
        ),
    ]


KERNELS = [
    kernel(
        "steps",
        "add_up",
        "dt A bias steps dt_batch dt_row length heads",
        dict(HEADS=8, W=W),
        W * 8 * HEADDIM,
        warps=4,
        registers=64,
        instructions=2.6,
    ),
    *sweeps(32, ccs=(80, 86, 89, 90, 120)),
    *sweeps(64, ccs=(100,)),
    *sweeps(16, warps=2, ccs=(100,)),  # without wgmma and tcgen05; sm_90 spills 7 with Triton 3.6
    *(
        kernel(
            f"near, {warps} warps",
            "near",
            f"{GRADIENTS} {STRIDES}",
            SIZES | dict(GRAD_Y_ROW=HEADS * HEADDIM, BLOCK=40, W=W, P=HEADDIM, TILES=1),
            W * HEADDIM,
            ccs=ccs,
            warps=warps,
            stages=2,
            stack=608 if warps == 2 else 64,
            spills=180 if warps == 2 else 0,  # the form without wgmma and tcgen05
            shared=84 * 1024,
            instructions=48 if warps == 8 else 31,
        )
        for warps, ccs in {2: (90, 100), 4: (80, 86, 89, 90, 120), 8: (100,)}.items()
    ),
    *(
        kernel(
            f"far, {rows} positions",
            "far",
            f"{GRADIENTS} entering leaving {STRIDES}",
            SIZES | dict(GRAD_Y_ROW=HEADS * HEADDIM, BLOCK=20, ROWS=rows, W=W, P=HEADDIM, TILES=1),
            rows * HEADDIM,
            ccs=ccs,
            warps=8,
            stages=2,
            stack=64,
            spills=8,  # of 900 instructions
            shared=116 * 1024,
            instructions=60 if rows == 64 else 112,
        )
        for rows, ccs in {32: (80, 86, 89, 120), 64: (90, 100)}.items()
    ),
    kernel(
        "finish",
        "finish",
        "dt A bias steps seq_idx flows grad_dt totals dt_batch dt_row length heads",
        dict(W=W),
        W * HEADDIM,
        warps=2,
        registers=168,
        instructions=14,
    ),
]
