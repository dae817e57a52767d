"""Reads what ptxas made of a kernel: registers, stack and loops of a cubin, by the tools in Triton's wheel."""

import re
import subprocess
import tempfile
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

INSTRUCTION = r"\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)(.*)"
LABEL = r"\s*(\.L\w+):"


@dataclass
class Loop:
    """A loop: its own instructions, without loops within it."""

    is_innermost: bool
    opcodes: list[str]

    @property
    def instructions(self) -> int:
        return len(self.opcodes)

    @property
    def spills(self) -> int:
        """Returns the number of instructions that read or write the stack."""
        return sum(opcode.startswith(("LDL", "STL")) for opcode in self.opcodes)

    @property
    def bytes(self) -> int:
        """Returns the bytes that a thread asks global memory, or a cache, to load and store."""
        moved = 0
        for opcode in self.opcodes:
            if opcode.startswith(("LDG", "STG")):
                bits = re.search(r"\.[US]?(8|16|64|128)\b", opcode)
                moved += int(bits.group(1)) // 8 if bits else 4
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


def listing(cubin: bytes) -> tuple[list[tuple[str, str]], dict[str, int]]:
    """Returns the instructions as (opcode with modifiers, operands), and {label: the instruction after it}."""
    code = []
    labels = {}
    for line in _said_about(cubin, "nvdisasm", "-c").splitlines():
        label = re.match(LABEL, line)
        instruction = re.match(INSTRUCTION, line)
        if label:
            labels[label.group(1)] = len(code)
        elif instruction and instruction.group(1) != "NOP":
            code.append(instruction.groups())
    return code, labels


def loops(cubin: bytes) -> list[Loop]:
    """Returns the loops, or the whole body if there is none."""
    code, labels = listing(cubin)
    ends: dict[int, int] = {}  # first instruction of a loop: its last
    for last, (opcode, operands) in enumerate(code):
        target = re.search(r"\((\.L\w+)\)", operands)
        if opcode.startswith("BRA") and target:
            first = labels.get(target.group(1), last)
            if first < last:  # the end of the code jumps to itself
                ends[first] = last  # `continue` jumps to the same start
    spans = list(ends.items()) or [(0, len(code) - 1)]
    found = []
    for first, last in spans:
        inside = [span for span in spans if first <= span[0] < span[1] < last]
        taken = {i for start, end in inside for i in range(start, end + 1)}
        own = [code[i][0] for i in range(first, last + 1) if i not in taken]
        found.append(Loop(not inside, own))
    return found
