"""The SSD's kernels in a layer of mamba2-2.7b (80 heads of 64 channels, d_state 128, one group, bf16), each row in one
segment, chunks of 32."""

from importlib import import_module

from benchmarks.kernels import Kernel

HEADS = 80
HEADDIM = 64
D_STATE = 128
Q = 32
BLOCK = 16
TYPES = {
    name: type
    for type, names in {
        "*bf16": "x dy dt B C entering leaving states out ddt",
        "*fp32": "A D bias steps first ends end_decays last dB dC flows totals",
        "*i32": "seq_idx",
        "i32": "x_batch dy_batch b_batch c_batch dt_batch dt_row length heads segments per_segment",
    }.items()
    for name in names.split()
}
ODD = {"segments", "per_segment", "length"}  # what need not be divisible by 16
SIZES = dict(
    HEADS=HEADS,
    SHARE=HEADS,
    HEADDIM=HEADDIM,
    D_STATE=D_STATE,
    Q=Q,
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
    "back": {16: 136, 32: 136, 64: 76},
    "local": {16: 41, 32: 38, 64: 22},
    "local back": {16: 41, 32: 38, 64: 22},
    "between": {32: 12, 64: 12},
    "gradients": {32: 210, 64: 170},
}
CHANNELS = {32: (80, 86, 89, 120), 64: (90, 100)}  # of the gradients' programs, by architecture
SWEEP = "x B C D steps {}ends end_decays {}last x_batch b_batch c_batch length segments per_segment"


def sweeps(P, warps=4, **more):
    """The sweeps with P channels in a program; `local`: before the others, where a row has several segments."""
    sizes = SIZES | dict(P=P, TILES=HEADDIM // P, first=None, LOCAL=False, REVERSE=False)
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


def gradients(name, more_arguments, P, ccs, elements, **more):
    """Of B and C, with P channels at a time."""
    arguments = f"dy x B C steps seq_idx {more_arguments}dB dC flows dy_batch x_batch b_batch c_batch length"
    return kernel(
        f"{name}, {P} channels",
        name,
        arguments,
        SIZES | dict(DY_ROW=HEADS * HEADDIM, BLOCK=BLOCK, P=P, TILES=HEADDIM // P),
        elements,
        ccs=ccs,
        instructions=BOUNDS[name][P],
        **more,
    )


KERNELS = [
    kernel(
        "steps",
        "add_up",
        "dt A bias steps dt_batch dt_row length heads",
        dict(HEADS=8, Q=Q),
        Q * 8 * HEADDIM,
        warps=4,
        registers=64,
        instructions=2.6,
    ),
    *sweeps(32, ccs=(80, 86, 89, 90, 120)),
    *sweeps(64, ccs=(100,)),
    *sweeps(16, warps=2, ccs=(100,)),  # without wgmma and tcgen05; sm_90 spills 7 with Triton 3.6
    *(
        gradients(
            "gradients",
            "entering leaving ",
            P,
            ccs,
            Q * HEADDIM,
            warps=8,
            stack=64,
            spills=4,  # of 1,100 instructions
            shared=56 * 1024,
        )
        for P, ccs in CHANNELS.items()
    ),
    kernel(
        "finish",
        "finish",
        "dt A bias steps seq_idx flows ddt totals dt_batch dt_row length heads",
        dict(Q=Q),
        Q * HEADDIM,
        warps=1,
        registers=168,
        instructions=9,
    ),
    *(gradients("between", "", P, ccs, 2 * Q * HEADDIM, warps=4) for P, ccs in CHANNELS.items()),
]
