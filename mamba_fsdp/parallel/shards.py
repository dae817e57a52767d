"""The part of a tensor that one rank holds, told the same way for every sharding strategy."""

from dataclasses import dataclass

import torch


@dataclass
class Shard:
    """Elements [start, start + data.numel()) of the flattened tensor `name`, whose whole has `shape`.

    data is 1-D and shares the storage of what is trained: writing to it changes the parameter. It may be empty.
    The same elements lie on `replicas` ranks, of which this is number `replica_index`.
    `tied` are other names of the same tensor.
    """

    name: str
    shape: tuple
    start: int
    data: torch.Tensor
    replicas: int = 1
    replica_index: int = 0
    tied: tuple = ()
