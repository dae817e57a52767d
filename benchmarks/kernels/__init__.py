"""Describes Triton kernels to the compiler: benchmarks/kernels/OPERATOR.py has the list of each operator."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Kernel:
    """A kernel at a realistic size, what one trip of its inner loop does, and what its code may cost at most.

    Instructions per element are a thread's: a loop's instructions x 32 x warps / elements, summed over the innermost
    loops (the whole body if there is no loop). A loop around them is divided by elements x trips.
    """

    name: str
    function: Callable[[], Any]  # returns the @triton.jit function; imports it only then
    signature: Mapping[str, str]  # argument -> "*bf16", "*fp32", "*i32", "i32", "i64", "fp32" ...
    constants: Mapping[
        str, Any
    ]  # of the arguments that are tl.constexpr (None for absent tensors too)
    elements: int  # (token, channel, state) or (token, channel) elements that one trip handles, of all warps together
    warps: int = 1
    stages: Mapping[int, int] = field(default_factory=dict)  # by architecture, if above 1
    stages_of_2: int = 0  # with Triton 2, if others
    trips: int = 0  # of an inner loop within one trip of the loop around it; 0: not worth counting
    programs: int = 32  # on a multiprocessor, of what a launch at that size has
    mark: tuple[str, int] | None = (
        None  # if ptxas unrolls: an opcode ("MUFU.EX2"), how often in a trip as written
    )
    aligned: Any = None  # arguments divisible by 16; default: all pointers
    floor: float = 0.0  # bytes for an element, if each is read or written once; 0: not counted
    ccs: tuple[int, ...] = (80, 86, 89, 90, 100, 120)  # architectures that it has these sizes on
    # At most, on every architecture and Triton:
    registers: int = 255
    stack: int = 0  # bytes
    shared: int = 48 * 1024  # bytes
    spills: int = 0  # instructions of innermost loops that read or write the stack
    instructions: float = float("inf")  # of a thread, for an element
    bytes: float = float("inf")  # that a thread loads and stores for an element, from caches too
