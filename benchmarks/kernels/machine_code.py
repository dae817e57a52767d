"""Reads what ptxas made of a kernel: registers, stack and loops of a cubin, by the tools in Triton's wheel."""

import re
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

from benchmarks.kernels.latency import cycles, slots

OPCODES = (  # kind of instruction, the opcodes; what is in none counts as "other"
    ("spill", r"LDL|STL"),
    ("tensor core", r"[A-Z]*MMA|UTC.*MMA"),
    ("special", r"MUFU"),  # exp2, log2, reciprocal, square root: 16 lanes a clock, the others 128
    ("memory", r"LDG|STG|LDGSTS|RED|ATOM|UBLKCP|UTMA"),
    ("shared", r"LDS|STS|LDSM|STSM|SHFL|BAR|WARPSYNC|SYNCS|DEPBAR"),
    ("float", r"F|HF|HA|HM|HS"),
    ("integer", r"I|U|LOP|LEA|SHF|PRMT|MOV|SEL|V|PLOP|S2|R2|CS2|P2|ISETP|BRA|BSSY|BSYNC|CALL|RET"),
)


@dataclass
class Loop:
    """A loop: its own instructions, without loops within it."""

    depth: int  # 0: no loop inside
    instructions: int
    cycles: float = (
        0  # of a warp alone, a trip (latency.py); around other loops, one for each instruction
    )
    slots: int = 0  # cycles in which it keeps others from issuing
    kinds: dict[str, int] = field(default_factory=dict)
    opcodes: dict[str, int] = field(default_factory=dict)

    @property
    def bytes(self) -> int:
        """Returns the bytes that a thread asks global memory, or a cache, to load and store."""
        moved = 0
        for opcode, times in self.opcodes.items():
            if re.match(r"LDG|STG", opcode):
                bits = re.search(r"\.[US]?(8|16|64|128)\b", opcode)
                moved += times * (int(bits.group(1)) // 8 if bits else 4)
        return moved


@lru_cache
def tool(name: str) -> str:
    """Returns the path of nvdisasm or cuobjdump, from the Triton on the path."""
    import triton

    found = sorted(Path(triton.__file__).parent.rglob(f"bin/{name}"))
    if not found:
        raise FileNotFoundError(f"{name} is not in Triton {triton.__version__}")
    return str(found[0])


def _said_about(cubin: bytes, *command: str) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run(
            [tool(command[0]), *command[1:], file.name], check=True, capture_output=True, text=True
        ).stdout


def resources(cubin: bytes) -> tuple[int, int]:
    """Returns the registers of a thread and its stack in bytes."""
    said = _said_about(cubin, "cuobjdump", "--dump-resource-usage")
    return tuple(int(re.search(rf"{word}:(\d+)", said).group(1)) for word in ("REG", "STACK"))


@lru_cache(maxsize=1)
def listing(cubin: bytes) -> tuple[list[tuple[str, str]], dict[str, int]]:
    """Returns the instructions as (opcode with modifiers, operands), and {label: the instruction after it}."""
    code = []
    labels = {}
    for line in _said_about(cubin, "nvdisasm", "-c").splitlines():
        if label := re.match(r"\s*(\.L\w+):", line):
            labels[label.group(1)] = len(code)
        elif found := re.match(
            r"\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)(.*)", line
        ):
            if found.group(1) != "NOP":
                code.append(found.groups())
    return code, labels


def loops(cubin: bytes) -> list[Loop]:
    """Returns the loops in the order of the code, or the whole body if there is none."""
    code, labels = listing(cubin)
    spans = set()
    for last, (opcode, operands) in enumerate(code):
        target = re.search(r"\((\.L\w+)\)", operands) if opcode.startswith("BRA") else None
        if (
            target and labels.get(target.group(1), last) < last
        ):  # the end of the code jumps to itself
            spans.add((labels[target.group(1)], last))
    starts: dict[int, int] = {}
    for first, last in spans:  # `continue` jumps to the same start
        starts[first] = max(last, starts.get(first, last))
    return _read(code, sorted(starts.items()) or [(0, len(code) - 1)])


def _read(code, spans):
    found = {}
    for first, last in sorted(spans, key=lambda span: span[1] - span[0]):
        inside = [span for span in found if first <= span[0] and span[1] <= last]
        taken = {i for span in inside for i in range(span[0], span[1] + 1)}
        own = [code[i][0] for i in range(first, last + 1) if i not in taken]
        kinds = Counter(
            next((kind for kind, names in OPCODES if re.match(names, opcode)), "other")
            for opcode in own
        )
        depth = 1 + max((found[span].depth for span in inside), default=-1)
        alone = code[first : last + 1]
        found[first, last] = Loop(
            depth,
            len(own),
            len(own) if depth else cycles(alone),
            len(own) if depth else slots(alone),
            dict(kinds),
            dict(Counter(own)),
        )
    return [found[span] for span in sorted(found)]
