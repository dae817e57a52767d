"""Kills runs at random moments, restarts them, and compares them bitwise with uninterrupted runs.

    python -m tests.storm [--rounds=12] [--seed=N] [--strategies=ddp,fsdp,hsdp,context]

Each round kills one rank, or all ranks as if their launcher had died. The moment is before the n-th file operation of
one kind in the run folder (MOMENTS lists the kinds), at the end of the n-th step, or a number of seconds after the
first step. The seed determines these numbers. What a run does after a number of seconds also depends on the speed of
the machine.
"""

import argparse
import json
import random
import shutil
import signal
import sys
import tempfile
from pathlib import Path

from tests.support.checkpoints import metrics_of
from tests.support.corpora import write_learnable
from tests.support.forked import start_ranks
from tests.support.processes import wait_until
from tests.support.tiny import TINY, format_arguments

# {strategy: number of ranks}. DDP has three ranks, because the order of a sum then matters. "context" is FSDP with
# context parallelism.
RANKS = {"ddp": 3, "fsdp": 2, "hsdp": 4, "context": 2}
STEPS = 8
SETTINGS = {
    **TINY,
    "kernels": "auto",
    "batch_size": 1,
    "global_batch_size": 12,
    "eval_interval": 5,
    "eval_batches": 1,
    "checkpoint_interval": 1,
    "keep_checkpoints": 2,
    "deterministic": True,
    "num_steps": STEPS,
}
SECONDS_TO_END = 400  # limit for the exit of ranks after one of them has died, on a busy machine
OF_RANK_0 = ("os.rename", "os.remove", "os.mkdir", "publish")
MOMENTS = ("time", "step", "open", *OF_RANK_0)
# {kind of moment: largest n}. The largest n of all other kinds is 8.
MAX_COUNTS = {"step": 5, "open": 60, "os.remove": 20, "publish": 6}


def main(arguments):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument("--strategies", default=",".join(RANKS))
    given = parser.parse_args(arguments)
    strategies = given.strategies.split(",")
    print(f"seed {given.seed}: {given.rounds} rounds", flush=True)
    with tempfile.TemporaryDirectory(prefix="storm-") as place:
        folder = Path(place)
        write_learnable(folder / "data/train", 0, 60)
        write_learnable(folder / "data/validation", 1, 20)
        for number, strategy in enumerate(strategies):
            begin = given.rounds * number // len(strategies)
            end = given.rounds * (number + 1) // len(strategies)
            choose = random.Random(f"{given.seed} {strategy}")
            Storm(folder / strategy, strategy, choose).rage(end - begin)
    print("all runs equal the uninterrupted ones", flush=True)


class Storm:
    """Kills the runs of one sharding strategy repeatedly, and compares them with an uninterrupted run."""

    def __init__(self, folder, strategy, choose):
        self.folder = folder
        self.choose = choose
        self.ranks = RANKS[strategy]
        self.per_node = 2 if strategy == "hsdp" else self.ranks
        self.settings = {**SETTINGS, "dataset_path": folder.parent / "data"}
        if strategy == "context":
            self.settings |= {"sharding_strategy": "fsdp", "context_parallel": self.ranks}
        else:  # Gated DeltaNet does not support context parallelism
            self.settings |= {"sharding_strategy": strategy, "layers": "mamba1,gdn+mlp"}
        folder.mkdir()

    def rage(self, rounds):
        assert self.start("whole")
        expected = self.results_of("whole")
        number = 0
        while rounds:
            run = f"killed-{number}"
            number += 1
            is_over = False
            while not is_over:
                kill = None
                if rounds:
                    kill = self.choose_kill(run)
                    rounds -= 1
                is_over = self.start(run, kill)
            found = self.results_of(run)
            wrong = [name for name in expected if expected[name] != found.get(name)]
            assert not wrong, f"{run}: other {', '.join(wrong)}"
            shutil.rmtree(self.folder / run)

    def choose_kill(self, run):
        """Returns which rank to kill, whether to kill all other ranks too, and the moment: the n-th file operation of
        a kind, the n-th step, or a number of seconds after the first step."""
        at = self.choose.choice(MOMENTS)
        nth = self.choose.randint(1, MAX_COUNTS.get(at, 8))
        if at == "time":
            nth = self.choose.uniform(0, 0.6)
        return {
            "at": at,
            "nth": nth,
            "rank": 0 if at in OF_RANK_0 else self.choose.randrange(self.ranks),
            "all": self.choose.random() < 0.5,
            "folder": str(self.folder / run),
        }

    def start(self, run, kill=None):
        """Starts the ranks of a run, and waits until all have ended. Returns whether all of them have ended normally.
        If one rank fails, the other ranks get SIGTERM, as from torchrun, or SIGKILL if kill["all"] is set."""
        settings = self.settings | {"save_ckpt_path": self.folder / run}
        settings["async_checkpoint"] = self.choose.random() < 0.6
        arguments = [json.dumps(kill), *format_arguments(settings)]
        program = ("-m", "tests.storm.rank")
        ranks = start_ranks(self.ranks, arguments, program, per_node=self.per_node)
        try:
            wait_until(lambda: any(rank.poll() is not None for rank in ranks), "a rank ends")
            if any(rank.poll() for rank in ranks):
                for rank in ranks:
                    rank.send_signal(signal.SIGKILL if kill and kill["all"] else signal.SIGTERM)
            outputs = [rank.communicate(SECONDS_TO_END)[0] for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
        codes = [rank.returncode for rank in ranks]
        print(f"{run}: {kill}: {codes}", flush=True)
        assert not any(codes) or -signal.SIGKILL in codes, "\n".join(outputs)
        return not any(codes)

    def results_of(self, run):
        """Returns the results of a finished run as a dict: {file name: bytes} of its last checkpoint and its published
        weights, and {"metrics": its metrics without times}."""
        folder = self.folder / run
        files = [*folder.glob(f"checkpoints/step_{STEPS:08d}/rank_*"), *folder.glob("pth/*/*.pth")]
        results = {file.name: file.read_bytes() for file in files}
        assert len(results) == self.ranks + 1, sorted(results)
        results["metrics"] = metrics_of(folder)
        return results


if __name__ == "__main__":
    main(sys.argv[1:])
