"""Runs the ranks of a training, and again after a failure that a restart can fix. For the cluster's own Python, see
host.py."""

from typing import Callable, Dict

from mamba_fsdp.launch.decision import Ending, starts_again_in_place
from mamba_fsdp.launch.host import say

FAILURES_OF_A_SICK_NODE = 2  # without a new checkpoint between them


class Starts:
    """The starts of a training's ranks within one start of the job, or of ./1.train.sbatch.

    run_ranks: runs the ranks once and returns the exit code. ending: returns what is known after they have ended with
    that code.
    """

    def __init__(self, run_ranks: Callable[[], int], ending: Callable[[int], Ending]) -> None:
        self.run_ranks = run_ranks
        self.ending = ending
        self.restarted_from = ""  # the newest checkpoint at the last restart
        self.failed_from = ""  # the newest checkpoint at the last failure
        self.failures: Dict[
            str, int
        ] = {}  # of each node whose rank failed first, from that checkpoint

    def run(self) -> Ending:
        """Returns how the training ended when restarting its ranks can't help any more."""
        while True:
            ending = self.ending(self.run_ranks())
            self.count_failure(ending)
            if not starts_again_in_place(ending, self.restarted_from):
                return ending
            self.restarted_from = ending.newest
            say("restarts   the ranks after the loss of " + ending.lost)

    def count_failure(self, ending: Ending) -> None:
        """Counts the first failure of a node's rank."""
        if ending.newest != self.failed_from:
            self.failed_from = ending.newest
            self.failures.clear()
        node = ending.outcome.node
        if node:
            self.failures[node] = self.failures.get(node, 0) + 1

    def is_sick(self, node: str) -> bool:
        """Returns whether a node's rank has failed first so often that the node is to blame."""
        return self.failures.get(node, 0) >= FAILURES_OF_A_SICK_NODE
