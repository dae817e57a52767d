"""Models one warp on Hopper: it issues in order, and waits if it needs a register that is not there yet."""

import re

MEMORY = 600  # cycles until a load from global memory is there; 300 if the L2 has it
WAITS = {"LDG": MEMORY, "BAR": 25, "LDS": 30, "LDSM": 33, "MUFU": 22, "SHFL": 24, "S2R": 30}
ARITHMETIC = 5  # cycles until any other result is there
SPECIAL = 8  # cycles of a scheduler for an instruction of the special unit: 4 lanes a clock
ROUNDS = 4  # trips, of which the last is counted: the first find everything there
STORES = {"STG", "STS", "STL", "STSM", "BAR", "BRA", "EXIT", "WARPSYNC"}
REGISTER = r"\b(U?R|U?P)(\d+)\b"


def _registers(text: str, width: int) -> set[str]:
    found = set()
    for kind, number in re.findall(REGISTER, text):
        span = width if kind == "R" else 1
        found.update(f"{kind}{int(number) + i}" for i in range(span))
    return found


def _width(opcode: str) -> int:
    """Returns the registers of a result."""
    return 4 if ".128" in opcode else 2 if ".64" in opcode or ".WIDE" in opcode else 1


def slots(code: list[tuple[str, str]]) -> int:
    """Returns the cycles in which a loop's instructions keep a scheduler, or the special unit, from all other warps."""
    return max(len(code), SPECIAL * sum(opcode.startswith("MUFU") for opcode, _ in code))


def cycles(code: list[tuple[str, str]]) -> float:
    """Returns the cycles of one trip of a lone warp through a loop. code: opcodes with modifiers and operands."""
    ready: dict[str, float] = {}
    now = before = 0.0
    for _ in range(ROUNDS):
        before = now
        for opcode, operands in code:
            name = opcode.partition(".")[0]
            result, _, sources = operands.partition(",")
            if name in STORES:
                result, sources = "", operands
            written = _registers(result, _width(opcode))
            needed = written | _registers(sources, 1)
            if ".64]" in sources:
                needed |= _registers(sources, 2)
            now = max([now, *(ready[register] for register in needed if register in ready)])
            later = now + WAITS.get(name, ARITHMETIC)
            ready.update(dict.fromkeys(written, later))
            now = later if name == "BAR" else now + 1
    return now - before
