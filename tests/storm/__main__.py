"""A storm: runs that are killed at random moments, started again, and then compared with unbroken ones bit for bit.

    python -m tests.storm [--rounds=12] [--seed=N] [--strategies=ddp,fsdp,hsdp,context]

A round is a kill: of one rank, of all, or of their launcher; at the n-th file operation of a kind (saving, committing,
pruning, consolidating and all else that touches the run folder), after a step, or at any time. The moments follow from
the seed, those of a time but for the machine's mood. Ranks are forked from this process, which has imported all they
need.
"""

import argparse
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

from tests.storm import rank

# DDP: from three on the order of a sum matters. context: fsdp whose ranks share each sequence.
RANKS = {"ddp": 3, "fsdp": 2, "hsdp": 4, "context": 2}
STEPS = 8
SECONDS_TO_END = 400  # for ranks whose launcher or peer is gone, on however busy a machine
TIMES = ("tokens_per_second", "mfu", "delaying_rank", "seconds", "goodput", "memory_gb", "gpu_")


def main(words):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument("--strategies", default=",".join(RANKS))
    given = parser.parse_args(words)
    strategies = given.strategies.split(",")
    print(f"seed {given.seed}: {given.rounds} rounds", flush=True)
    with tempfile.TemporaryDirectory(prefix="storm-") as place:
        folder = Path(place)
        rank.make_data(folder)
        rank.import_all()
        for number, strategy in enumerate(strategies):
            begin = given.rounds * number // len(strategies)
            end = given.rounds * (number + 1) // len(strategies)
            choose = random.Random(f"{given.seed} {strategy}")
            Storm(folder / strategy, strategy, choose).rage(end - begin)
    print("all runs ended as the unbroken ones", flush=True)


class Storm:
    """Kills of runs under one strategy."""

    def __init__(self, folder, strategy, choose):
        self.folder = folder
        self.strategy = strategy
        self.choose = choose
        self.ranks = RANKS[strategy]
        self.starts = 0
        folder.mkdir()

    def rage(self, rounds):
        code, _ = self.start("whole")
        assert code == 0, self.said()
        expected, number = self.left_by("whole"), 0
        while rounds:
            run, number = f"killed-{number}", number + 1
            while True:
                kill = self.choose_kill() if rounds else None
                rounds -= bool(kill)
                code, seconds = self.start(run, kill)
                print(
                    f"{self.strategy} {run} start {self.starts} {kill}: code {code}, the last rank ended after "
                    f"{seconds:.2f} s",
                    flush=True,
                )
                assert seconds < SECONDS_TO_END, f"a rank lived on\n{self.said()}"
                if code == 0:
                    break
                if kill is None:
                    assert (self.folder / f"start-{self.starts}" / "fired").exists(), self.said()
            found = self.left_by(run)
            wrong = [name for name in expected if expected[name] != found.get(name)]
            assert not wrong, f"{self.strategy} {run}: other {', '.join(wrong)}"
            shutil.rmtree(self.folder / run)

    def choose_kill(self):
        """{"whom", "rank", and the moment}: the n-th file operation of a kind, a step, or seconds after the first."""
        kill = {
            "whom": self.choose.choice(["rank", "rank", "all", "launcher"]),
            "rank": self.choose.randrange(self.ranks),
        }
        at = self.choose.choice(
            ["time", "step", "open", "os.rename", "os.remove", "os.mkdir", "publish"]
        )
        if at == "time":
            return {**kill, "at": at, "nth": round(self.choose.uniform(0, 0.6), 3)}
        if at == "publish":
            return {**kill, "rank": 0, "at": at, "nth": self.choose.randint(1, 6)}
        if at in ("os.rename", "os.remove", "os.mkdir"):
            kill["rank"] = 0
        return {
            **kill,
            "at": at,
            "nth": self.choose.randint(1, {"step": 5, "open": 60, "os.remove": 20}.get(at, 8)),
        }

    def start(self, run, kill=None):
        """(exit code of the launcher, seconds from the first death to the last) of a start of the run."""
        self.starts += 1
        scratch = self.folder / f"start-{self.starts}"
        scratch.mkdir()
        task = {
            "run": str(self.folder / run),
            "data": str(self.folder.parent / "data"),
            "kill": kill,
            "scratch": str(scratch),
            "strategy": self.strategy,
            "ranks": self.ranks,
            "steps": STEPS,
            "async": self.choose.random() < 0.6,
        }
        launcher = rank.fork(rank.launch, task)
        _, status = os.waitpid(launcher, 0)
        ended = time.monotonic()
        while rank.living(scratch):
            if time.monotonic() > ended + SECONDS_TO_END:
                for pid in rank.living(scratch):
                    os.kill(pid, signal.SIGUSR2)  # its stacks go to its log
                time.sleep(1)
                for pid in rank.living(scratch):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.01)
        first = scratch / "fired"
        code = os.waitstatus_to_exitcode(status)
        return code, time.time() - first.stat().st_mtime if code and first.exists() else 0.0

    def said(self):
        """The logs of the last start."""
        scratch = self.folder / f"start-{self.starts}"
        return "\n".join(
            f"--- {log}\n{log.read_text()[-3000:]}" for log in sorted(scratch.glob("*.log"))
        )

    def left_by(self, run):
        """What a finished run has left, without times: weights and moments as bytes, metrics."""
        folder = self.folder / run
        files = sorted(
            [*folder.glob(f"checkpoints/step_{STEPS:08d}/rank_*"), *folder.glob("pth/*/*.pth")]
        )
        left = {file.name: file.read_bytes() for file in files}
        assert len(left) == self.ranks + 1, sorted(left)
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        left["metrics"] = [
            {key: value for key, value in line.items() if not any(word in key for word in TIMES)}
            for line in lines
        ]
        return left


if __name__ == "__main__":
    main(sys.argv[1:])
