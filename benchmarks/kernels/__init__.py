"""Describes Triton kernels to the compiler: benchmarks/kernels/OPERATOR.py has the list of each operator."""

from collections.abc import Callable, Collection, Mapping
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
    constants: Mapping[str, Any]  # of tl.constexpr arguments and, as None, of absent tensors
    elements: int  # (token, channel) or (token, channel, state), of one trip of all warps
    aligned: Collection[str]  # arguments that 16 divides
    warps: int = 1
    stages: Mapping[int, int] = field(default_factory=dict)  # by architecture, if above 1
    stages_of_2: int = 0  # with Triton 2, if others
    trips: int = 0  # of an inner loop in one trip of the loop around it; 0: not worth counting
    ccs: tuple[int, ...] = (80, 86, 89, 90, 100, 120)  # architectures that it has these sizes on
    # At most, on every architecture and Triton:
    registers: int = 255
    stack: int = 0  # bytes
    shared: int = 48 * 1024  # bytes
    spills: int = 0  # instructions of innermost loops that read or write the stack
    instructions: float = float("inf")  # of a thread, for an element
    bytes: float = float("inf")  # that a thread loads and stores for an element, from caches too
