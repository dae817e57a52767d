"""Updates the matrices of mixers and MLPs along their orthogonalised momentum (Muon), all other parameters by AdamW.

Jordan et al. 2024, kellerjordan.github.io/posts/muon. A step is scaled as in Liu et al. 2025, Muon is
Scalable for LLM Training (arXiv 2502.16982): its elements are as large as AdamW's, so that one
learning rate and one weight decay serve both. Matrices that lie stacked in one parameter (in_proj's
z, x, B, C and dt) are orthogonalised one by one.

The rank that owns a parameter orthogonalises its matrices, whole and once: the ranks of the owner's
shard group send it their parts of the momentum, and it sends all ranks their parts of the step. That
takes two all-to-alls, each for all parameters at once and in the dtype of the orthogonalisation."""

import math
from collections.abc import Iterable, Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from mamba_fsdp.parallel.model import ParameterSlot
from mamba_fsdp.parallel.world import World

# Jordan's values.
MOMENTUM = 0.95
ITERATIONS = 5
COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # singular values come to lie in 0.7 .. 1.2
MIN_NORM = 1e-7
ADAMW_RMS = 0.2  # of the elements of AdamW's step, with a learning rate of 1 (Liu et al.)


def _assign_owners(slots: Iterable[ParameterSlot], ranks: int) -> list[list[ParameterSlot]]:
    """Returns the parameters that each rank owns. The most costly parameter goes first, to the rank
    with the least load. A cost is about the multiply-adds of one iteration."""
    costs = {slot: min(slot.shape) * math.prod(slot.shape) for slot in slots}
    owned: list[list[ParameterSlot]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    for slot in sorted(costs, key=costs.__getitem__, reverse=True):
        rank = loads.index(min(loads))
        owned[rank].append(slot)
        loads[rank] += costs[slot]
    return owned


def _orthogonalized_step(matrix: Tensor) -> Tensor:
    """Returns approximately U V^T of the matrix U S V^T, by Newton-Schulz iterations, scaled to the
    size of AdamW's step at a learning rate of 1."""
    rows, columns = matrix.shape
    if rows > columns:
        return _orthogonalized_step(matrix.T).T
    a, b, c = COEFFICIENTS
    x = matrix / (matrix.norm() + MIN_NORM)
    for _ in range(ITERATIONS):
        gram = x @ x.T
        polynomial = torch.addmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.addmm(x, polynomial, x, beta=a)
    return ADAMW_RMS * math.sqrt(columns) * x


class Muon(torch.optim.AdamW):
    """An AdamW that updates the parameters of `rows` by Muon. All ranks step together."""

    def __init__(
        self,
        groups: list[Any],
        rows: dict[ParameterSlot, list[int]],
        world: World,
        dtype: torch.dtype,
        **adamw: Any,
    ) -> None:
        """groups: the parameters that AdamW updates. rows: how many rows each of the matrices has
        that are stacked in a parameter. dtype: of the orthogonalisation."""
        super().__init__([*groups, {"params": [slot.local for slot in rows]}], **adamw)
        self.rows = rows
        self.world = world
        self.empty = torch.empty(0, dtype=dtype, device=world.device)
        self.owned = _assign_owners(rows, world.size)
        for slot in rows:
            self.state[slot.local]["momentum_buffer"] = torch.zeros_like(slot.local)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Takes a step, as AdamW's. The device skips it if the attribute `found_inf` is 1."""
        refused = getattr(self, "found_inf", torch.zeros(()))
        momenta = {slot: self._update_momentum(slot, refused) for slot in self.rows}
        group = self.param_groups[-1]
        rate = group["lr"] * (1 - refused)
        for slot, step in zip(chain(*self.owned), self._steps(momenta)):
            slot.local.mul_(1 - rate * group["weight_decay"])
            slot.local.sub_(rate * step.view_as(slot.local).float())
        super().step()  # skips the matrices, whose gradients are None by now

    def _update_momentum(self, slot: ParameterSlot, refused: Tensor) -> Tensor:
        """Returns this rank's part of the matrix to orthogonalise: Nesterov's momentum, one step
        ahead. Takes the gradient into the momentum."""
        mean = self.state[slot.local]["momentum_buffer"]
        gradient = slot.local.grad
        slot.local.grad = None
        if gradient is None:  # FSDP1: this rank has no part of this parameter
            return self.empty
        gradient = torch.where(refused > 0, mean, gradient)
        mean.lerp_(gradient, 1 - MOMENTUM)
        return gradient.lerp_(mean, MOMENTUM).view(-1).to(self.empty.dtype)

    def _steps(self, momenta: Mapping[ParameterSlot, Tensor]) -> tuple[Tensor, ...]:
        """Returns this rank's parts of all parameters' steps at a learning rate of 1, ordered by
        owner, from its parts of the momenta."""
        rank = self.world.rank
        ranks = range(self.world.size)
        mine = self.owned[rank]
        outgoing = [
            [momenta[slot][: _elements_to_send(slot, rank, owner)] for slot in self.owned[owner]]
            for owner in ranks
        ]
        incoming = [[_elements_to_send(slot, other, rank) for slot in mine] for other in ranks]
        parts = self._exchange(outgoing, incoming)

        steps = []
        for number, slot in enumerate(mine):
            whole = torch.cat(parts[number :: len(mine)]).view(slot.shape)
            matrices = whole.split(self.rows[slot])
            steps.append(torch.cat([_orthogonalized_step(matrix) for matrix in matrices]).view(-1))
        outgoing = [[step[slot.part(other)] for slot, step in zip(mine, steps)] for other in ranks]
        incoming = [[slot.local.numel() for slot in slots] for slots in self.owned]
        return self._exchange(outgoing, incoming)

    def _exchange(
        self, outgoing: list[list[Tensor]], incoming: list[list[int]]
    ) -> tuple[Tensor, ...]:
        """Returns the tensors that all ranks sent to this one, after sending each rank its list in
        `outgoing`. incoming: the sizes of the tensors to receive, by rank."""
        counts = [sum(map(len, tensors)) for tensors in outgoing]
        expected = list(map(sum, incoming))
        sent = torch.cat([self.empty, *chain(*outgoing)])
        received = self.world.all_to_all(sent, counts, expected)
        return received.split(list(chain(*incoming)))


def _elements_to_send(slot: ParameterSlot, rank: int, owner: int) -> int:
    """Returns how many elements of a parameter a rank sends to the owner: all that the rank holds,
    or none if it is not in the owner's shard group, which holds the whole parameter."""
    group = slot.layout.ranks
    if rank // group != owner // group:
        return 0
    held = slot.part(rank)
    return held.stop - held.start
