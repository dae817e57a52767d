"""The loss of one token of mamba-1.4b or mamba2-2.7b, bf16: a vocabulary of 50288 rows."""

from benchmarks.kernels import Kernel

SIGNATURE = dict(logits="*bf16", labels="*i64", token_weights="*fp32", losses="*fp32", vocab="i32")


def kernel():
    from mamba_fsdp.ops.loss.triton_kernels import cross_entropy

    return cross_entropy


def entry(name, instructions, gradient=True, weighted=False, **more):
    signature = {
        name: kind for name, kind in SIGNATURE.items() if weighted or name != "token_weights"
    }
    constants = dict(IGNORED=-100, GRADIENT=gradient, BLOCK=4096) | (
        {} if weighted else {"token_weights": None}
    )
    return Kernel(
        name,
        kernel,
        signature,
        constants,
        elements=4096,
        warps=8,
        aligned=tuple(signature),
        instructions=instructions,
        registers=96,
        **more,
    )


KERNELS = [
    entry("alone", 14, gradient=False),
    entry("with gradient", 30),
    entry("with gradient, weights", 30, weighted=True),
]
