"""The part of a tensor that one rank holds, told the same way for every sharding strategy."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from mamba_fsdp.heartbeat import heart


@dataclass
class Shard:
    """The elements [start, start + count) of the tensor `name`, flattened row by row. Counts are elements, not bytes.

    shape: of the whole tensor, the same on all ranks. data: these elements, of shape (count,), maybe (0,), on the
    rank's device; it shares the storage of what is trained: writing to it changes the parameter. The same elements lie
    on `replicas` ranks, of which this is number `replica_index`. tied: other names of the same tensor.
    """

    name: str
    shape: tuple[int, ...]
    start: int
    data: torch.Tensor
    replicas: int = 1
    replica_index: int = 0
    tied: tuple[str, ...] = ()


@torch.no_grad()
def fill_parts(shards: Iterable[Shard], part_of: Callable[[str, tuple[int, ...], int, int], torch.Tensor]) -> None:
    """Set every shard from `part_of(name, shape, start, stop)`, the elements [start, stop) of the flattened tensor."""
    for shard in shards:
        if shard.data.numel():
            shard.data.copy_(part_of(shard.name, shard.shape, shard.start, shard.start + shard.data.numel()))
            heart.beat()
