"""Measures how the threads of a step on the CPU wait for each other:

    python -m benchmarks.threads [--rounds 12] [--busy 0]

For each way to wait, a process of its own takes training steps (`benchmarks.scan`'s, of small models) when it is asked
to, four in turn with the others; the first is not counted. The table has medians in tokens/s, and their ratios to what
mamba_fsdp sets by itself. --busy is the number of processes that compute meanwhile.
"""

import argparse
import os
import statistics
import subprocess
import sys
from contextlib import ExitStack

WAYS = {  # libgomp's names for them; mamba_fsdp sets nothing if the first of them is set
    "as mamba_fsdp sets": {},
    "without spinning (PASSIVE)": {"OMP_WAIT_POLICY": "PASSIVE"},
    "1,000 spins": {"GOMP_SPINCOUNT": "1000"},
    "100,000 spins": {"GOMP_SPINCOUNT": "100000"},
    "300,000 spins, libgomp's own": {"GOMP_SPINCOUNT": "300000"},
}
MODELS = {  # the layers and the vocabulary of four layers of 128, over 8 x 256 tokens
    "demo": ("mamba1", 4096),
    "Mamba-2": ("mamba2", 4096),
    "benchmarks.scan tiny": ("mamba1", 1024),
}
TOKENS = 8 * 256
WARM_UP = 3
BUSY = "x = 1.0\nwhile True: x *= 1.0000001"
ANSWER_STEPS = "import sys; from benchmarks.threads import answer; answer(sys.argv[1])"


def answer(model: str) -> None:
    """Takes a step for each line of stdin and prints its seconds."""
    import time

    from benchmarks.scan import make_step
    from mamba_fsdp.ops import cpp

    layers, vocab_size = MODELS[model]
    cpp.tune_process("cpu")
    step = make_step("tiny", vocab_size, "auto", layers)
    for _ in range(WARM_UP):
        step()
    print("ready", flush=True)
    for _ in sys.stdin:
        began = time.perf_counter()
        step()
        print(time.perf_counter() - began, flush=True)


class Stepper:
    """A process that takes steps of a model when it is asked to."""

    def __init__(self, model: str, way: dict[str, str]) -> None:
        environment = {
            name: value
            for name, value in os.environ.items()
            if name not in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "OMP_NUM_THREADS")
        }
        self.process = subprocess.Popen(
            [sys.executable, "-c", ANSWER_STEPS, model],
            env=environment | way,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.seconds: list[float] = []

    def wait_until_ready(self) -> None:
        line = self.process.stdout.readline()
        if line != "ready\n":
            sys.exit("error: a process that should take steps ended; see the lines above")

    def step(self) -> float:
        """Returns the seconds of a step."""
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return float(self.process.stdout.readline())

    def take_turn(self) -> None:
        self.step()  # others have used the caches
        for _ in range(3):
            self.seconds.append(self.step())


def measure(model: str, rounds: int, busy: int) -> dict[str, float]:
    """Returns {way: tokens/s}."""
    with ExitStack() as stack:
        steppers = {}
        for name, way in WAYS.items():
            steppers[name] = Stepper(model, way)
            stack.callback(steppers[name].process.kill)
        for stepper in steppers.values():
            stepper.wait_until_ready()
        for _ in range(busy):
            process = subprocess.Popen([sys.executable, "-c", BUSY])
            stack.callback(process.kill)
        for _ in range(rounds):
            for stepper in steppers.values():
                stepper.take_turn()
    return {name: TOKENS / statistics.median(stepper.seconds) for name, stepper in steppers.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--busy", type=int, default=0)
    arguments = parser.parse_args()
    for model in MODELS:
        speeds = measure(model, arguments.rounds, arguments.busy)
        usual = speeds["as mamba_fsdp sets"]
        print(f"{model + f', {arguments.busy} busy processes':<44}{'tokens/s':>10}{'ratio':>8}")
        for name, speed in speeds.items():
            print(f"{name:<44}{speed:>10,.0f}{speed / usual:>8.2f}")
        print(flush=True)


if __name__ == "__main__":
    main()
