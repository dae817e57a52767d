"""Reads the registers, the stack size and the innermost loops of a compiled kernel (cubin), with the tools in Triton's wheel."""

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
    """The instructions of an innermost loop."""

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
        """Returns the total number of bytes that the global loads and stores of one thread move. Loads that a cache serves
        are included."""
        moved = 0
        for opcode in self.opcodes:
            if opcode.startswith(("LDG", "STG")):
                bits = re.search(r"\.[US]?(8|16|64|128)\b", opcode)
                moved += int(bits.group(1)) // 8 if bits else 4
        return moved


@lru_cache
def tool(name: str) -> str:
    """Returns the path of nvdisasm or cuobjdump in the Triton that this process imports."""
    import triton

    found = sorted(Path(triton.__file__).parent.rglob(f"bin/{name}"))
    if not found:
        raise FileNotFoundError(f"{name} is not in Triton {triton.__version__}")
    return str(found[0])


def _run_tool(cubin: bytes, *command: str) -> str:
    """Runs a command on a file with the content `cubin`, and returns its output."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run(
            [tool(command[0]), *command[1:], file.name], check=True, capture_output=True, text=True
        ).stdout


def resources(cubin: bytes) -> tuple[int, int]:
    """Returns (registers, bytes of stack) per thread."""
    usage = _run_tool(cubin, "cuobjdump", "--dump-resource-usage")
    return tuple(int(re.search(rf"{name}:(\d+)", usage).group(1)) for name in ("REG", "STACK"))


def listing(cubin: bytes) -> tuple[list[tuple[str, str]], dict[str, int]]:
    """Returns ([(opcode with modifiers, operands)], {label: index of the instruction after it})."""
    code = []
    labels = {}
    for line in _run_tool(cubin, "nvdisasm", "-c").splitlines():
        label = re.match(LABEL, line)
        instruction = re.match(INSTRUCTION, line)
        if label:
            labels[label.group(1)] = len(code)
        elif instruction and instruction.group(1) != "NOP":
            code.append(instruction.groups())
    return code, labels


def loops(cubin: bytes) -> list[Loop]:
    """Returns the innermost loops. A kernel without loops counts as one loop."""
    code, labels = listing(cubin)
    ends: dict[int, int] = {}  # {index of the first instruction of a loop: index of its last one}
    for last, (opcode, operands) in enumerate(code):
        target = re.search(r"\((\.L\w+)\)", operands)
        if opcode.startswith("BRA") and target:
            first = labels.get(target.group(1), last)
            if first < last:  # the last instruction of the code is a jump to itself
                ends[first] = last  # several jumps of a loop can have the same target
    spans = list(ends.items()) or [(0, len(code) - 1)]
    found = []
    for first, last in spans:
        is_innermost = not any(first <= start < end < last for start, end in spans)
        if is_innermost:
            found.append(Loop([opcode for opcode, _ in code[first : last + 1]]))
    return found
