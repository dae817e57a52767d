"""Runs the ranks of a training, and restarts them after failures that a restart can fix.

This module runs on the cluster's own Python; host.py describes the restrictions.
"""

from typing import Callable, Dict

from mamba_fsdp.launch.decision import JobState, should_restart_ranks
from mamba_fsdp.launch.host import print_line

# A node with this many failures since the newest checkpoint counts as sick.
MAX_FAILURES_PER_NODE = 2


class RankRestarts:
    """Runs and restarts the ranks within one start of the job, or of ./1.train.sbatch.

    run_ranks: runs the ranks once and returns the exit code. job_state: returns the state after the
    ranks have ended with an exit code.
    """

    def __init__(self, run_ranks: Callable[[], int], job_state: Callable[[int], JobState]) -> None:
        self.run_ranks = run_ranks
        self.job_state = job_state
        self.restarted_from = ""  # the newest checkpoint at the last restart
        self.failed_from = ""  # the newest checkpoint at the last failure
        # {node: how often a rank on this node failed first since the checkpoint `failed_from`}
        self.failures: Dict[str, int] = {}

    def run(self) -> JobState:
        """Runs the ranks until restarting them can't help any more. Returns the final state."""
        while True:
            state = self.job_state(self.run_ranks())
            self.count_failure(state)
            if not should_restart_ranks(state, self.restarted_from):
                return state
            self.restarted_from = state.newest
            print_line("restarts   the ranks after the loss of " + state.lost)

    def count_failure(self, state: JobState) -> None:
        """Counts a failure of the node on which a rank failed first. If there is a newer
        checkpoint, forgets the earlier failures first.
        """
        if state.newest != self.failed_from:
            self.failed_from = state.newest
            self.failures.clear()
        node = state.outcome.node
        if node:
            self.failures[node] = self.failures.get(node, 0) + 1

    def is_sick(self, node: str) -> bool:
        """Returns whether ranks of this node were the first to fail so often that the node is to
        blame.
        """
        return self.failures.get(node, 0) >= MAX_FAILURES_PER_NODE
