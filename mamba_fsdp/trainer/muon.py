"""Implements Muon: updates the matrices of mixers and MLPs by their orthogonalized momentum, all other parameters by
AdamW.

The algorithm is described in Jordan et al. 2024, kellerjordan.github.io/posts/muon. An update is scaled as in Liu et al.
2025, Muon is Scalable for LLM Training (arXiv 2502.16982): its elements are as large as in an update of AdamW, so the
same learning rate and weight decay are suitable for both. If a parameter consists of several stacked matrices, such as
in_proj with its parts for z, x, B, C and dt, these are orthogonalized separately.

Each parameter has an owner, the one rank that orthogonalizes its matrices. The ranks of the owner's shard group send
their parts of the momentum to the owner, and the owner sends each rank its part of the update. This takes two
all-to-alls. Each of them transfers all parameters together, in the dtype of the orthogonalization.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from mamba_fsdp.parallel.model import ParameterSlot
from mamba_fsdp.parallel.world import World

Coefficients = Sequence[tuple[float, float, float]]
# Each Newton-Schulz iteration replaces a singular value s by a s + b s^3 + c s^5. Each list contains the (a, b, c)
# of the iterations. Before the first iteration the matrix is scaled to a Frobenius norm of 1, so its singular values are at
# most 1.
COEFFICIENTS: dict[str, Coefficients] = {
    # Jordan et al. Singular values above 0.0015 become values between 0.68 and 1.21.
    "jordan": 5 * [(3.4445, -4.7750, 2.0315)],
    # These are the polynomials with the smallest maximum error, one for each iteration, as in Amsel et al. 2025, The Polar
    # Express (arXiv 2505.16932). Singular values above 0.01 become values between 0.72 and 1.27.
    "minimax": [
        (8.0934, -23.6205, 17.4462),
        (3.6366, -2.7219, 0.5365),
        (2.6613, -1.9772, 0.4526),
    ],
}
MIN_NORM = 1e-7
MAX_BATCH = 1 << 26  # maximum number of elements in the matrices that are orthogonalized together
# Root mean square of the elements of AdamW's update at a learning rate of 1 (Liu et al.).
ADAMW_RMS = 0.2


def _assign_owners(slots: Iterable[ParameterSlot], ranks: int) -> list[list[ParameterSlot]]:
    """Assigns an owner to each parameter. Returns the list of parameters of each rank.

    Parameters are assigned in the order of decreasing cost, each to the rank with the lowest load. The cost is
    proportional to the multiply-adds of one iteration.
    """
    costs = {slot: min(slot.shape) * math.prod(slot.shape) for slot in slots}
    owned: list[list[ParameterSlot]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    for slot in sorted(costs, key=costs.__getitem__, reverse=True):
        rank = loads.index(min(loads))
        owned[rank].append(slot)
        loads[rank] += costs[slot]
    return owned


def _replace_with_updates(matrices: list[Tensor], coefficients: Coefficients) -> None:
    """Replaces each matrix in the list with its update at a learning rate of 1: see `orthogonalize`.

    Matrices of one shape, or of its transpose, are orthogonalized together, up to MAX_BATCH elements at a time, because
    a few large products take less time than many small ones.
    """
    numbers_by_shape = defaultdict(list)
    for number, matrix in enumerate(matrices):
        numbers_by_shape[min(matrix.shape), max(matrix.shape)].append(number)
    for (rows, columns), numbers in numbers_by_shape.items():
        together = max(1, MAX_BATCH // (rows * columns))
        for first in range(0, len(numbers), together):
            chosen = numbers[first : first + together]
            batch = torch.stack([_wide(matrices[number]) for number in chosen])
            for number, update in zip(chosen, orthogonalize(batch, coefficients)):
                is_wide = matrices[number].shape == update.shape
                matrices[number] = update if is_wide else update.T


def _wide(matrix: Tensor) -> Tensor:
    rows, columns = matrix.shape
    return matrix.T if rows > columns else matrix


def orthogonalize(batch: Tensor, coefficients: Coefficients) -> Tensor:
    """Approximates U V^T of each matrix with the SVD U S V^T, by Newton-Schulz iterations.

    The result is scaled to the size of an update of AdamW at a learning rate of 1.

    batch: (matrices, rows, columns), with rows <= columns. coefficients: (a, b, c) of each iteration.
    """
    norms = torch.linalg.matrix_norm(batch, keepdim=True)
    x = batch / (norms + MIN_NORM)
    for a, b, c in coefficients:
        gram = x @ x.mT
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, polynomial, x, beta=a)
    return ADAMW_RMS * math.sqrt(batch.shape[-1]) * x


class Muon(torch.optim.AdamW):
    """AdamW that updates the parameters in `rows` by Muon. All ranks call `step` at the same point."""

    def __init__(
        self,
        groups: list[Any],
        rows: dict[ParameterSlot, list[int]],
        world: World,
        dtype: torch.dtype,
        momentum: float,
        coefficients: Coefficients,
        **adamw: Any,
    ) -> None:
        """groups: the parameter groups that AdamW updates.

        rows: {parameter: [number of rows of each stacked matrix]}. dtype: the dtype of the orthogonalization.
        momentum: the decay rate of the momentum. coefficients: (a, b, c) of each Newton-Schulz iteration. adamw: the
        arguments of AdamW.
        """
        super().__init__([*groups, {"params": [slot.local for slot in rows]}], **adamw)
        self.rows = rows
        self.momentum = momentum
        self.coefficients = coefficients
        self.world = world
        self.empty = torch.empty(0, dtype=dtype, device=world.device)
        self.owned = _assign_owners(rows, world.size)
        for slot in rows:
            self.state[slot.local]["momentum_buffer"] = torch.zeros_like(slot.local)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Takes one step. If the attribute `found_inf` is 1, the device does not change weights and moments."""
        refused = getattr(self, "found_inf", torch.zeros(()))
        momenta = {slot: self._update_momentum(slot, refused) for slot in self.rows}
        group = self.param_groups[-1]
        rate = group["lr"] * (1 - refused)
        for slot, update in zip(chain(*self.owned), self._updates(momenta)):
            slot.local.mul_(1 - rate * group["weight_decay"])
            slot.local.sub_(rate * update.view_as(slot.local).float())
        super().step()  # this skips the matrices, because their gradients are None now

    def _update_momentum(self, slot: ParameterSlot, refused: Tensor) -> Tensor:
        """Adds the gradient to the momentum. Returns this rank's part of the matrix to orthogonalize, flattened.

        The matrix is the Nesterov momentum: the momentum one step ahead.
        """
        mean = self.state[slot.local]["momentum_buffer"]
        gradient = slot.local.grad
        slot.local.grad = None
        if gradient is None:  # with FSDP1, a rank can have no part of a parameter
            return self.empty
        gradient = torch.where(refused > 0, mean, gradient)
        mean.lerp_(gradient, 1 - self.momentum)
        return gradient.lerp_(mean, self.momentum).view(-1).to(self.empty.dtype)

    def _updates(self, momenta: Mapping[ParameterSlot, Tensor]) -> tuple[Tensor, ...]:
        """Returns this rank's part of the update of each parameter at a learning rate of 1, ordered by owner.

        momenta: this rank's part of each matrix to orthogonalize.
        """
        rank = self.world.rank
        ranks = range(self.world.size)
        mine = self.owned[rank]
        outgoing = [
            [momenta[slot][: _elements_to_send(slot, rank, owner)] for slot in self.owned[owner]]
            for owner in ranks
        ]
        incoming = [[_elements_to_send(slot, other, rank) for slot in mine] for other in ranks]
        parts = self._exchange(outgoing, incoming)

        wholes = [
            torch.cat(parts[number :: len(mine)]).view(slot.shape)
            for number, slot in enumerate(mine)
        ]
        del parts
        matrices = [
            matrix for slot, whole in zip(mine, wholes) for matrix in whole.split(self.rows[slot])
        ]
        # The matrices are views of the whole parameters. Without `wholes`, a parameter's storage is freed as soon as the
        # updates have replaced all its matrices.
        del wholes
        _replace_with_updates(matrices, self.coefficients)
        stacked = iter(matrices)
        updates = [torch.cat([next(stacked) for _ in self.rows[slot]]).view(-1) for slot in mine]
        outgoing = [
            [update[slot.part(other)] for slot, update in zip(mine, updates)] for other in ranks
        ]
        incoming = [[slot.local.numel() for slot in slots] for slots in self.owned]
        return self._exchange(outgoing, incoming)

    def _exchange(
        self, outgoing: list[list[Tensor]], incoming: list[list[int]]
    ) -> tuple[Tensor, ...]:
        """Sends each rank its list in `outgoing`, and returns the tensors received from all ranks.

        incoming: the sizes of the tensors to receive from each rank.
        """
        if self.world.size == 1:
            return tuple(outgoing[0])
        counts = [sum(map(len, tensors)) for tensors in outgoing]
        expected = list(map(sum, incoming))
        sent = torch.cat([self.empty, *chain(*outgoing)])
        received = self.world.all_to_all(sent, counts, expected)
        return received.split(list(chain(*incoming)))


def _elements_to_send(slot: ParameterSlot, rank: int, owner: int) -> int:
    """Returns how many elements of a parameter a rank sends to the owner.

    A rank of the owner's shard group sends all its elements. Other ranks send none, because the owner's group has
    all parts of the parameter.
    """
    group = slot.layout.ranks
    if rank // group != owner // group:
        return 0
    part = slot.part(rank)
    return part.stop - part.start
