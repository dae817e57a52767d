"""Launches a kernel on the null device with arguments of many kinds. Each kind is launched several times. The first
launch is made by Triton. The later launches bypass Triton, and must have the same kernel and arguments as the first
one."""

from unittest.mock import patch

import torch
import triton.language as tl
from triton.compiler import CompiledKernel
from triton.runtime.jit import JITFunction

from mamba_fsdp.ops.triton import kernel


@kernel
def add(X, Y, number, factor, SIZE: tl.constexpr, BIAS=None):
    places = tl.arange(0, SIZE)
    x = tl.load(X + places)
    if BIAS is not None:
        x += tl.load(BIAS + places)
    tl.store(Y + places, x * factor + number)


X = torch.zeros(64, device="cuda")
BASE = {"X": X, "Y": X, "number": 7, "factor": 0.5, "SIZE": 16, "num_warps": 1}
KINDS = {
    "as it is": {},
    "dtype": {"X": X.bfloat16()},
    "address": {"X": X[1:]},
    "16 divides": {"number": 32},
    "8 divides": {"number": 8},
    "one": {"number": 1},
    "64 bits": {"number": 1 << 40},
    "constant": {"SIZE": 32},
    "warps": {"num_warps": 2},
    "stages": {"num_stages": 2},
    "default": {"BIAS": X},
    "device": {"device": 1},
}


def launched(device=0, **changed):
    """Returns the compiled kernel of a launch, and the other arguments of the launcher in C."""
    gotten = []
    hook = lambda *arguments: gotten.extend(arguments)  # noqa: E731
    with torch.cuda.device(device), patch.object(CompiledKernel, "launch_enter_hook", hook):
        add[1, 2](**BASE | changed)
    compiled = gotten.pop(13)
    return compiled, [
        value.data_ptr() if torch.is_tensor(value) else value
        for value in gotten
        if value is not hook
    ]


def main():
    with patch.object(JITFunction, "run", autospec=True, side_effect=JITFunction.run) as by_triton:
        first = {kind: launched(**changed) for kind, changed in KINDS.items()}
        assert (
            by_triton.call_count == len(KINDS) == len({compiled for compiled, _ in first.values()})
        )
        assert {kind: launched(**changed) for kind, changed in KINDS.items()} == first
        assert by_triton.call_count == len(KINDS)
        try:
            launched(X=X.cpu())
        except ValueError as error:
            assert "cpu tensor" in str(error)
        else:
            raise AssertionError("a tensor of the CPU was launched")


if __name__ == "__main__":
    main()
