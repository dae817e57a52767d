"""Selects the nodes of a job that train; the others wait as spares. This code does no I/O.

This module runs on the cluster's own Python; host.py describes the restrictions.
"""

from typing import Dict, List, NamedTuple, Optional


class Batch(NamedTuple):
    """The division of the global batch among ranks, computed by launch/plan.py."""

    samples: int  # global_batch_size; 0 if the global batch grows with the number of ranks
    samples_per_rank: int  # samples per step of `ranks_per_sample` ranks; used if `samples` is 0
    ranks_per_sample: int  # the setting context_parallel: how many ranks share each sample

    def samples_per_step(self, nodes: int, ranks_per_node: int) -> int:
        """Returns the global batch size in samples on this number of nodes."""
        groups = nodes * ranks_per_node // self.ranks_per_sample
        return self.samples or self.samples_per_rank * groups


class NodePool:
    """The nodes of a job.

    left_out: {node: reason} of nodes that are lost or sick and not used any more. suspected: {node:
    reason} of nodes that were sick in an earlier start; they train only if there are not enough
    other nodes.
    """

    def __init__(self, nodes: List[str], spare_nodes: int, min_nodes: int) -> None:
        """min_nodes: the smallest number of nodes that can train, or 0 if the training needs all
        nodes but the spares.
        """
        self.nodes = nodes
        self.wanted = len(nodes) - spare_nodes
        self.min_nodes = min_nodes or self.wanted
        self.left_out: Dict[str, str] = {}
        self.suspected: Dict[str, str] = {}

    def healthy(self) -> List[str]:
        """Returns the nodes that can train, in order of preference."""
        nodes = [node for node in self.nodes if node not in self.left_out]
        return sorted(nodes, key=lambda node: node in self.suspected)

    def has_enough_nodes(self) -> bool:
        """Returns whether enough nodes are left, regardless of the division of the global batch."""
        return bool(self.choose())

    def choose(self, batch: Optional[Batch] = None, ranks_per_node: int = 1) -> List[str]:
        """Returns the nodes that train, in the job's order; [] if there are too few.

        batch: if fewer nodes than wanted train, it must be possible to divide this global batch
        evenly among them. None if the global batch is not known yet.
        """
        healthy = self.healthy()
        count = min(self.wanted, len(healthy))
        if batch:
            while count and not can_divide_batch(batch, self.wanted, ranks_per_node, count):
                count -= 1
        if count < max(1, self.min_nodes):
            return []
        chosen = healthy[:count]
        return [node for node in self.nodes if node in chosen]


def can_divide_batch(batch: Batch, wanted: int, ranks_per_node: int, nodes: int) -> bool:
    """Returns whether the global batch of `wanted` nodes can be divided evenly among `nodes` nodes."""
    if nodes == wanted:
        return True
    ranks = nodes * ranks_per_node
    if ranks % batch.ranks_per_sample:
        return False
    return batch.samples_per_step(wanted, ranks_per_node) % (ranks // batch.ranks_per_sample) == 0
