"""Lists SSD's kernels in a layer of mamba2-2.7b (80 heads of 64 channels, d_state 128, one group, bf16), each row in
one segment, chunks of 32."""

from importlib import import_module

from benchmarks.kernels import Kernel
from mamba_fsdp.ops.ssd.triton import FAR, NEAR, SWEEP

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
        "i32": "x_batch grad_y_batch b_batch c_batch out_batch dt_batch dt_row grad_dt_batch grad_dt_row length heads segments per_segment",
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


ALL = (80, 86, 89, 90, 100, 120)


def options_on(table, cc):
    return table[max(capability for capability in table if capability <= divmod(cc, 10))]


def launches(table):
    """Returns [(options of a launch, except num_stages; num_stages by architecture)]."""
    found = []
    for cc in ALL:
        options = dict(options_on(table, cc))
        stages = {cc: options.pop("num_stages")}
        same = [of for known, of in found if known == options]
        if same:
            same[0].update(stages)
        else:
            found.append((options, stages))
    return found


# At most, of instructions for an element, by the channels of a program:
BOUNDS = {
    "forward": {16: 110, 32: 114, 64: 62},
    "forward with documents": {16: 123, 32: 143, 64: 68},
    "forward with states": {16: 140, 32: 149, 64: 80},
    "states": {16: 56, 32: 56, 64: 34},
    "back": {16: 136, 32: 148, 64: 78},
    "local": {16: 43, 32: 38, 64: 22},
    "local back": {16: 43, 32: 38, 64: 22},
}
GRADIENTS = "grad_y x B C steps seq_idx grad_B grad_C flows"
STRIDES = "grad_y_batch x_batch b_batch c_batch length"
SWEEP_ARGUMENTS = "x B C D steps {}ends end_decays {}last x_batch b_batch c_batch out_batch length segments per_segment"


def sweeps(options, stages):
    """Returns the sweeps with P channels in a program; `local`: before the others, if a row has several segments."""
    P = options["P"]
    sizes = SIZES | dict(Q=Q, P=P, TILES=HEADDIM // P, first=None, LOCAL=False, REVERSE=False)
    sizes["OUT_ROW"] = HEADS * HEADDIM
    back = sizes | dict(REVERSE=True, X_ROW=sizes["OUT_ROW"], OUT_ROW=sizes["X_ROW"])

    def sweep(title, arguments, constants):
        copies_ahead = constants.get("out", "given") and not constants["LOCAL"]
        return kernel(
            f"{title}, {P} channels",
            "sweep",
            SWEEP_ARGUMENTS.format(*arguments),
            constants,
            Q * P,
            warps=options["num_warps"],
            stages=stages if copies_ahead else {},
            stages_of_2=1,
            instructions=BOUNDS[title][P],
            registers=128 if constants["LOCAL"] else 255,
            stack=64 if copies_ahead else 0,
            spills=16 if copies_ahead else 0,  # of 940 instructions, with Triton 3.9 on sm_90
            ccs=tuple(stages),
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
        sweep("forward with states", ("seq_idx ", "states out "), sizes),
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


def near(options, stages, headdim=HEADDIM, **more):
    warps = options["num_warps"]
    row = HEADS * headdim + 2 * D_STATE
    rows = dict(GRAD_Y_ROW=HEADS * headdim, X_ROW=row, B_ROW=row, C_ROW=row)
    sizes = dict(HEADDIM=headdim, TILES=headdim // HEADDIM, BLOCK=options["BLOCK"], W=W, P=HEADDIM)
    return kernel(
        f"near, {headdim} channels, {warps} warps",
        "near",
        f"{GRADIENTS} {STRIDES}",
        SIZES | rows | sizes,
        W * headdim,
        ccs=tuple(stages),
        warps=warps,
        stages=stages,
        **more,
    )


def far(options, stages):
    rows = options["ROWS"]
    sizes = dict(BLOCK=options["BLOCK"], ROWS=rows, W=W, P=HEADDIM, TILES=1)
    return kernel(
        f"far, {rows} positions",
        "far",
        f"{GRADIENTS} entering leaving {STRIDES}",
        SIZES | sizes | dict(GRAD_Y_ROW=HEADS * HEADDIM),
        rows * HEADDIM,
        ccs=tuple(stages),
        warps=options["num_warps"],
        stages=stages,
        stack=64,
        spills=8,  # of 900 instructions
        shared=116 * 1024,
        instructions=60 if rows == 64 else 112,
    )


# Without wgmma and tcgen05, as use_simpler_form makes them:
SIMPLER_SWEEP = {"P": 16, "num_warps": 2}
SIMPLER_NEAR = {"BLOCK": 40, "num_warps": 2}

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
    *(each for launch in launches(SWEEP) for each in sweeps(*launch)),
    *sweeps(SIMPLER_SWEEP, {100: 1}),  # sm_90 spills 7 with Triton 3.6
    *(near(*launch, stack=64, shared=84 * 1024, instructions=48) for launch in launches(NEAR)),
    near(SIMPLER_NEAR, {90: 2, 100: 1}, stack=608, spills=180, shared=84 * 1024, instructions=31),
    near(
        options_on(NEAR, 80),
        {80: 2, 86: 2, 89: 2, 90: 2},
        headdim=256,
        stages_of_2=1,
        stack=192,
        spills=18,
        shared=164 * 1024,
        instructions=12,
    ),
    *(far(*launch) for launch in launches(FAR)),
    kernel(
        "finish",
        "finish",
        "dt A bias steps seq_idx flows grad_dt totals dt_batch dt_row grad_dt_batch grad_dt_row length heads",
        dict(W=W),
        W * HEADDIM,
        warps=2,
        registers=168,
        instructions=14,
    ),
]
