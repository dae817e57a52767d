"""Selects kernels in the first minute on a GPU: tests the candidate backends there, and takes the fastest correct ones.

1. The candidates are the backends that this machine has for the model's operators. Rank 0 tests each (layer_check.py) and
   gives it a verdict.
2. A candidate that gives wrong results, does not compile or raises an error is passed over, with a message. If only the
   reference is left for a scan, the run stops. A candidate that hangs until the watchdog ends the process is passed over
   at the next start. If the process ends in another way while a candidate is tried, it is passed over at the third start:
   a time limit or a person may have ended the process. If memory is full or storage
   fails, there is no verdict: the run ends, and its next start tries the candidate again.
3. The first right candidate of each operator is taken. Every other right one is timed in its place, at the run's shape,
   and kept there if that is faster. With deterministic=true nothing is timed, and results must repeat.
4. The run keeps the choice for all its starts, until it asks for something else. The choice is also stored next to the
   runs, for later runs with the same GPU and software.
5. At every start, each rank tests the chosen backends. An error names the rank whose results are wrong or differ in
   bits.

A model that is not trained (evaluate, generate) takes the first right candidates.
"""

import contextlib
import dataclasses
import hashlib
import json
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import distributions
from pathlib import Path
from typing import Any, TypeVar

import torch

from mamba_fsdp.errors import NodeFault, TransientError, UserError
from mamba_fsdp.ops import backends as known
from mamba_fsdp.ops.backends import REFERENCE, BackendChoice, resolve_backends
from mamba_fsdp.ops.fused import VARIES
from mamba_fsdp.parallel.parallelize import SHARDED_STRATEGIES, choose_strategy
from mamba_fsdp.parallel.world import World
from mamba_fsdp.planning.estimate import local_machine
from mamba_fsdp.run.names import CACHES, KERNELS
from mamba_fsdp.run.records import Write
from mamba_fsdp.settings.train_config import TrainConfig
from mamba_fsdp.storage.patience import make_folder, read_text, write_atomically
from mamba_fsdp.storage.typed_json import read_object
from mamba_fsdp.text import format_count
from mamba_fsdp.this_process import progress, rank_and_host
from mamba_fsdp.trainer.fingerprint import code_digest
from mamba_fsdp.trainer.layer_check import READS, READS_AFTER_STATE, LayerCheck, LostGpu

T = TypeVar("T")
MAX_MESSAGES = 4  # of ranks on which the check fails
DEVICES = {"cuda"}  # on which backends are tested before use
RIGHT = "right"  # a verdict
ENDED_STARTS = 2  # starts that ended while a candidate was tried, before it is passed over


@dataclass
class Candidate:
    """A backend of an operator, and what was found about it."""

    operator: str
    backend: str
    verdict: str = ""  # RIGHT, or why it is passed over; "" before it is tested
    simpler: bool = False  # whether the verdict is about the backend's simpler form
    ended_starts: int = 0  # starts that ended while it was tried
    milliseconds: float | None = None  # of a layer of each kind; None if it was not timed

    def backends(self) -> dict[str, str]:
        """Returns the backend for the operator and, of a mixer, for its parts."""
        parts = known.parts_with(self.operator, self.backend)
        return dict.fromkeys([self.operator, *parts], self.backend)


@dataclass
class Record:
    """The contents of kernels.json."""

    made_for: list[str] = field(default_factory=list)  # what the choice depends on
    candidates: list[Candidate] = field(default_factory=list)
    choice: BackendChoice = field(default_factory=BackendChoice)  # empty before it is made

    @classmethod
    def read(cls, path: Path) -> "Record":
        """Returns an empty record if there is no file."""
        try:
            return read_object(path, cls, "delete it to choose backends again")
        except FileNotFoundError:
            return cls()

    def write(self, path: Path, write: Write) -> None:
        """Writes the file. write: a run's own is `Lease.write`."""
        write(path, json.dumps(dataclasses.asdict(self), indent=1) + "\n")

    def passed_over(self) -> dict[tuple[str, str], str]:
        """Returns {(operator, backend): why} of the candidates that were tested and are not right."""
        return {
            (each.operator, each.backend): each.verdict
            for each in self.candidates
            if each.verdict not in ("", RIGHT)
        }

    def served(self) -> set[str]:
        """Returns the operators that have a right candidate."""
        return {each.operator for each in self.candidates if each.verdict == RIGHT}

    def use_simpler_forms(self) -> None:
        """Makes this process use the forms that the verdicts are about."""
        for candidate in self.candidates:
            if candidate.simpler:
                known.use_simpler_form(candidate.operator, candidate.backend)


class FirstUse:
    """The choice of backends for the settings of a run, on a device."""

    def __init__(
        self, settings: TrainConfig, device: torch.device, is_sharded: bool = False
    ) -> None:
        self.settings = settings
        self.device = device.type
        self.kernels = settings.training.kernels
        self.uses = settings.operator_uses(device.type)
        self.asked = f"kernels={self.kernels} for {self.uses}"
        self.demanded = known.demands(self.kernels, self.uses)
        self.layers = LayerCheck(settings, device, is_sharded)
        self.record = Record()
        self.path: Path | None = None  # of the run's kernels.json
        self.write: Write = write_atomically  # replaces that file

    def holds_for(self) -> list[str]:
        """Returns everything on which it depends which backends are right and fast."""
        conditions = [
            self.asked,
            str(self.layers.model),
            str(self.layers.shape),
            f"sharded: {self.layers.is_sharded}",
            local_machine().device,
            os.environ.get("TRITON_PTXAS_PATH", ""),
        ]
        with contextlib.suppress(OSError):
            conditions.append(read_text("/proc/driver/nvidia/version"))
        installed = [f"{package.name} {package.version}" for package in distributions()]
        return [*conditions, *sorted(installed), code_digest()]

    # 1. and 2. Verdicts

    def prove(self, first_only: bool = False) -> None:
        """Gives each candidate its verdict, or (first_only) those up to the first right one of each operator. Raises
        TransientError if one can't be tested now."""
        record = self.record
        if not record.candidates:
            found = known.candidates(self.demanded, self.device, self.uses)
            record.candidates = [Candidate(*names) for names in found]
        record.use_simpler_forms()
        for candidate in record.candidates:
            if candidate.ended_starts >= ENDED_STARTS:
                candidate.verdict = "earlier starts hung or ended while it was tried"
            elif candidate.verdict:
                continue
            elif candidate.backends().items() & record.passed_over().keys():
                candidate.verdict = "a part of it is passed over"
            elif not first_only or candidate.operator not in record.served():
                with self.trial(candidate):
                    candidate.verdict = self.verdict_on(candidate)

    @contextlib.contextmanager
    def trial(self, candidate: Candidate) -> Iterator[None]:
        """Returns a context manager. If the process ends inside, kernels.json says so to the next start."""
        before = candidate.ended_starts

        def note(ended_starts: int) -> None:
            candidate.ended_starts = ended_starts
            if self.path:
                self.record.write(self.path, self.write)

        note(before + 1)
        progress.on_stall = partial(note, ENDED_STARTS)
        try:
            yield
        except LostGpu:
            before += 1
            raise
        finally:
            progress.on_stall = None
            note(before)

    def verdict_on(self, candidate: Candidate) -> str:
        """Returns the verdict, which is about the backend's simpler form if the usual one fails."""
        wrong, _ = self.layers.check(REFERENCE | candidate.backends())
        if not wrong:
            return RIGHT
        if candidate.simpler or not known.use_simpler_form(candidate.operator, candidate.backend):
            return wrong
        candidate.simpler = True
        return self.verdict_on(candidate)

    # 3. Choosing

    def resolve(self, preferred: Mapping[str, str] = {}) -> BackendChoice:
        """Returns the choice among the right candidates."""
        failed = self.record.passed_over()
        return resolve_backends(
            self.kernels, self.device, self.uses, failed=failed, preferred=preferred
        )

    def fastest(self) -> tuple[BackendChoice, str]:
        """Returns the choice and, in words, what was timed for it. Raises UserError if only plain PyTorch is left for a
        scan and the settings do not demand it: a step would take minutes. SSD in fp32 is excepted: it is matrix products,
        which PyTorch computes well. So is Gated DeltaNet: not every stack and GPU can have kernels for it."""
        best = self.resolve()
        slow = {"scan"} if self.layers.dtype == torch.float32 else {"scan", "ssd"}
        for operator in slow - self.demanded.keys():
            if best.backends.get(operator) == "reference":
                raise UserError(
                    f"only plain PyTorch is left for {operator}, far too slow to train with here "
                    f"({best}); install mamba-ssm and causal-conv1d (an image with INSTALL_KERNELS=1), or Triton and a "
                    f"C compiler; kernels={operator}=reference uses it anyway"
                )
        rivals = [
            each
            for each in self.record.candidates
            if each.verdict == RIGHT and best.backends.get(each.operator) != each.backend
        ]
        if self.layers.deterministic or not rivals:
            return best, "tested, not timed: one right backend an operator, or deterministic=true"
        least = self.layers.milliseconds(best.backends)
        for rival in rivals:
            choice = self.resolve(best.backends | rival.backends())
            with self.trial(rival):
                rival.milliseconds = self.layers.milliseconds(choice.backends)
            if rival.milliseconds < least:
                best = choice
                least = rival.milliseconds
        return best, f"tested, and the fastest of {1 + len(rivals)} combinations"

    # 4. Keeping

    def choose(self, folder: Path, write: Write) -> tuple[Record, str]:
        """Returns the choice and, in words, where it comes from; rank 0 calls it. Raises UserError if no backend can be
        used for an operator."""
        self.write = write
        self.path = folder / KERNELS
        self.record = Record.read(self.path)
        if self.record.choice.backends and self.asked in self.record.made_for:
            return self.record, "chosen when this run began"
        made_for = self.holds_for()
        identity = hashlib.sha256(repr(made_for).encode()).hexdigest()
        shared = folder.parent / CACHES / "kernels" / f"{identity}.json"
        earlier = Record.read(shared)
        if earlier.choice.backends:
            earlier.write(self.path, write)
            return earlier, f"chosen for an earlier run ({shared})"
        if self.record.made_for != made_for:
            self.record = Record(made_for)
        self.prove()
        self.record.choice, origin = self.fastest()
        self.record.write(self.path, write)
        if not any(candidate.ended_starts for candidate in self.record.candidates):
            with contextlib.suppress(OSError):  # without the file, the next run tests by itself
                make_folder(shared.parent, parents=True)
                self.record.write(shared, write_atomically)
        return self.record, origin

    # 5. At every start

    def examine(self, record: Record) -> tuple[str, str]:
        """Returns (what was tested on which device, a hash of the results' bits, or "" if a backend's results don't
        repeat). Raises UserError if a chosen backend fails on this rank."""
        record.use_simpler_forms()
        backends = record.choice.backends
        wrong, bits = self.layers.check(backends)
        if wrong:
            raise UserError(f"{rank_and_host()}: {wrong}")
        self.layers.expected.clear()
        torch.cuda.empty_cache()  # does nothing without a GPU
        if not repeats(self.settings, backends):
            bits = ""
        return f"{local_machine().device} {self.layers.tests}", bits


def repeats(settings: TrainConfig, backends: Mapping[str, str]) -> bool:
    """Returns whether these backends give the same bits each time on a GPU."""
    fused = any(backends.get(operator) == "fused" for operator in VARIES)
    return settings.training.deterministic or not (fused or settings.model.has_mixer("attention"))


def choose_for_answers(settings: TrainConfig, device: torch.device) -> BackendChoice:
    """Returns the backends for a model that is not trained. Nothing is timed or stored."""
    use = FirstUse(settings, device)
    use.layers.tests = []
    use.layers.reads = READS + READS_AFTER_STATE
    if device.type in DEVICES:
        use.prove(first_only=True)
    return use.resolve()


def test_this_node(settings: TrainConfig, folder: Path) -> str:
    """Tests the backends that a run has chosen, on each GPU of this node by one process. Returns what was tested. Raises
    UserError if one fails."""
    record = Record.read(folder / KERNELS)
    if not record.choice.backends:
        return "the run has chosen no kernels yet"
    for index in range(torch.cuda.device_count()):
        device = torch.device("cuda", index)
        torch.cuda.set_device(device)
        FirstUse(settings, device).examine(record)
    return f"the run's kernels are correct on {format_count(torch.cuda.device_count(), 'GPU')}"


def on_all_nodes(world: World, work: Callable[..., T], *inputs: Any) -> T:
    """Returns the result of `work(*inputs)` on this rank. If it fails on some nodes only, raises NodeFault on their ranks
    and TransientError on all others: the job goes on without these nodes. If it fails on all, raises the UserErrors of all."""
    failures: list[UserError] = []

    def try_work() -> Any:
        try:
            return work(*inputs)
        except UserError as error:
            failures.append(error)

    result = world.run_local(try_work)
    failed = world.gather_unique([(socket.gethostname(), str(error)) for error in failures])
    if not failed:
        return result
    nodes = world.gather_unique([socket.gethostname()])
    if len({node for node, _ in failed}) < len(nodes):
        if failures:
            raise NodeFault(str(failures[0]))
        raise TransientError("; ".join(message for _, message in failed[:MAX_MESSAGES]))
    world.on_all_ranks(raise_first, failures)
    raise AssertionError("all nodes have failed")


def raise_first(failures: Sequence[UserError]) -> None:
    """Raises the first of the errors, if there is one."""
    if failures:
        raise failures[0]


def choose(
    settings: TrainConfig, world: World, folder: Path, write: Write = write_atomically
) -> tuple[BackendChoice, str]:
    """Returns the same choice on all ranks and, in words, where it comes from. write: replaces a file of the run
    `folder`. Raises UserError on all ranks if there is no choice or it fails on any rank."""
    began = time.perf_counter()
    is_sharded = choose_strategy(settings.parallel, world) in SHARDED_STRATEGIES
    use = FirstUse(settings, world.device, is_sharded)
    record, origin = world.on_rank0(use.choose, folder, write)

    try:
        tested, bits = on_all_nodes(world, use.examine, record)
        tested0, bits0, where0 = world.broadcast_object((tested, bits, rank_and_host()))

        def compare() -> None:
            if tested == tested0 and bits != bits0:
                raise UserError(f"{rank_and_host()}: its bits differ from those of {where0}")

        on_all_nodes(world, compare)
    except TransientError:
        raise
    except UserError as error:
        raise UserError(
            f"the chosen kernels fail on {error}. If only one node fails, its GPU or its installation is faulty: "
            f"exclude it (--exclude=NODE). Otherwise delete {folder / KERNELS} and {folder.parent / CACHES}/kernels; "
            "kernels are then chosen again, and results differ in their last bits"
        ) from None
    seconds = time.perf_counter() - began
    return (
        record.choice,
        f"{origin}; correct on {format_count(world.size, 'rank')}, {seconds:.1f} s",
    )
