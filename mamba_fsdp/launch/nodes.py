"""Decides which nodes of a job train, and which wait as spares. No I/O. For the cluster's own Python, see host.py."""

from typing import Callable, Dict, List, NamedTuple


class Batch(NamedTuple):
    """How a global batch is shared, from launch/plan.py."""

    samples: int  # global_batch_size; 0 if it follows from the number of ranks
    samples_per_rank: int  # in a step, if `samples` is 0
    ranks_per_sample: int  # context_parallel

    def of_nodes(self, nodes: int, ranks_per_node: int) -> int:
        """Returns the samples of a step on so many nodes."""
        groups = nodes * ranks_per_node // self.ranks_per_sample
        return self.samples or self.samples_per_rank * groups


class NodePool:
    """The nodes of a job. left_out: why each node that is lost or sick takes no part any more. suspected: nodes that were
    sick in an earlier start, which train only if no other node can."""

    def __init__(self, nodes: List[str], spare_nodes: int, min_nodes: int) -> None:
        """min_nodes: 0 if the training needs all its nodes."""
        self.nodes = nodes
        self.wanted = len(nodes) - spare_nodes
        self.least = min_nodes or self.wanted
        self.left_out: Dict[str, str] = {}
        self.suspected: Dict[str, str] = {}  # node: reason

    def healthy(self) -> List[str]:
        """Returns the nodes that can train, in the order in which they are chosen."""
        nodes = [node for node in self.nodes if node not in self.left_out]
        return sorted(nodes, key=lambda node: node in self.suspected)

    def has_enough(self) -> bool:
        """Returns whether the nodes that are left can train, however the global batch is shared."""
        return bool(self.choose(lambda nodes: True))

    def choose(self, can_share: Callable[[int], bool]) -> List[str]:
        """Returns the nodes that train, in the job's order; [] if there are too few.

        can_share: returns whether the global batch can be divided among fewer nodes than were wanted."""
        healthy = self.healthy()
        count = min(self.wanted, len(healthy))
        while count < self.wanted and count >= self.least and not can_share(count):
            count -= 1
        if count < max(1, self.least):
            return []
        chosen = healthy[:count]
        return [node for node in self.nodes if node in chosen]


def can_share(batch: Batch, wanted: int, ranks_per_node: int, nodes: int) -> bool:
    """Returns whether the global batch of `wanted` nodes can be divided among so many `nodes`."""
    ranks = nodes * ranks_per_node
    if ranks % batch.ranks_per_sample:
        return False
    return batch.of_nodes(wanted, ranks_per_node) % (ranks // batch.ranks_per_sample) == 0
