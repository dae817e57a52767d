"""Measures how the threads of a step on the CPU wait for each other:

    python -m benchmarks.threads [--rounds 36] [--busy 0]

For each way to wait, a process of its own takes training steps of a small model on all cores, in turn with the others.
The table has medians, and ratios to what mamba_fsdp sets by itself. --busy is the number of processes that compute
meanwhile.
"""

import statistics
import subprocess
import sys
from contextlib import ExitStack
from functools import partial

from benchmarks.measure import command_line, steps_in_turn, table, times_as_fast
from benchmarks.scan import SIZES, settings_of, step_on_tokens

USUAL = "30,000 spins, as mamba_fsdp sets"
WAYS = {  # variables of libgomp; mamba_fsdp sets nothing if the first of them is set
    USUAL: {"GOMP_SPINCOUNT": "30000"},
    "no spinning (PASSIVE)": {"OMP_WAIT_POLICY": "PASSIVE"},
    "1,000 spins": {"GOMP_SPINCOUNT": "1000"},
    "100,000 spins": {"GOMP_SPINCOUNT": "100000"},
    "300,000 spins, libgomp's own": {"GOMP_SPINCOUNT": "300000"},
}
MODELS = {  # their layers and vocabulary
    "demo": ("mamba1", 4096),
    "Mamba-2": ("mamba2", 4096),
    "benchmarks.scan tiny": ("mamba1", 1024),
}
SIZE = SIZES["tiny"]
BUSY = "x = 1.0\nwhile True: x *= 1.0000001"


def measure(model: str, rounds: int) -> list[dict[str, str]]:
    """Returns a row for each way."""
    layers, vocab_size = MODELS[model]
    make_step = partial(step_on_tokens, settings_of(SIZE, vocab_size, layers))
    taken = steps_in_turn(dict.fromkeys(WAYS, make_step), rounds, WAYS)
    seconds = {way: [step.seconds for step in steps] for way, steps in taken.items()}
    rows = []
    for way in WAYS:
        rate = SIZE.batch * SIZE.length / statistics.median(seconds[way])
        row = {"model": model, "waits with": way, "tokens/s": f"{rate:,.0f}"}
        row["x usual"] = f"{times_as_fast(seconds[way], seconds[USUAL]):.2f}"
        rows.append(row)
    return rows


def main() -> None:
    parser = command_line(__doc__, rounds=36)
    parser.add_argument("--busy", type=int, default=0)
    given = parser.parse_args()
    rows = []
    with ExitStack() as stack:
        for _ in range(given.busy):
            process = subprocess.Popen([sys.executable, "-c", BUSY])
            stack.callback(process.kill)
        for model in MODELS:
            rows += measure(model, given.rounds)
    print(f"{given.busy} busy processes")
    print(table(rows))


if __name__ == "__main__":
    main()
