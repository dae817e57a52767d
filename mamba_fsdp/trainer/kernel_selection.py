"""Selects a backend for each operator in the first minute on a GPU: tests candidates, and takes the fastest correct ones.

1. The candidates are the backends that this machine has for the model's operators. Rank 0 tests each of them
   (layer_check.py) and records a verdict.
2. A candidate is rejected if its results are wrong, if it does not compile, or if it raises an error. If only the
   reference is left for a scan, the run stops. A candidate that hangs until the watchdog ends the process is rejected at
   the next start. If the process ends in another way during a test, the candidate is rejected at the third start, because
   a time limit or a user can have ended the first two. If the GPU is out of memory or the storage fails, there is no
   verdict: the run ends, and its next start tests the candidate again.
3. The first correct candidate of each operator is selected. Then every other correct candidate is put in the place of the
   selected one, and the layers are timed with the shape of the run. A faster candidate replaces the selected one. With
   deterministic=true nothing is timed, and the results of a candidate must be reproducible.
4. The run keeps the selection for all its starts, unless its settings ask for other kernels. The selection is also stored
   in a folder next to the runs, for later runs with the same GPU and software.
5. At every start, each rank tests the selected backends. If the results of a rank are wrong, or differ from rank 0 in
   their bits, the error names this rank.

For inference (evaluate, generate), the first correct candidates are selected without timing.
"""

import contextlib
import dataclasses
import hashlib
import json
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import distributions
from pathlib import Path
from typing import Any, TypeVar

import torch

from mamba_fsdp.errors import NodeFault, TransientError, UserError
from mamba_fsdp.ops import backends as operators
from mamba_fsdp.ops.backends import REFERENCE, BackendChoice, resolve_backends
from mamba_fsdp.ops.fused import VARIES
from mamba_fsdp.parallel.parallelize import SHARDED_STRATEGIES
from mamba_fsdp.parallel.world import World
from mamba_fsdp.planning.estimate import local_machine
from mamba_fsdp.run.names import CACHES, KERNELS
from mamba_fsdp.run.records import Write
from mamba_fsdp.settings.train_config import TrainConfig
from mamba_fsdp.storage.retry import make_folder, read_text, write_atomically
from mamba_fsdp.storage.typed_json import read_object
from mamba_fsdp.text import format_count
from mamba_fsdp.this_process import progress, rank_and_host
from mamba_fsdp.trainer.fingerprint import code_digest
from mamba_fsdp.trainer.layer_check import READS, READS_AFTER_STATE, GpuLostError, LayerCheck

T = TypeVar("T")
MAX_MESSAGES = 4  # an error contains the messages of at most this many ranks
TESTED_DEVICES = {"cuda"}  # backends for these devices are tested before use
RIGHT = "right"  # the verdict on a correct candidate
MAX_ENDED_STARTS = 2  # if this many starts ended during the test of a candidate, it is rejected


@dataclass
class Candidate:
    """A backend for an operator, and the results of its tests."""

    operator: str
    backend: str
    verdict: str = ""  # RIGHT, or the reason for its rejection; "" before the test
    simpler: bool = False  # whether the verdict applies to the simpler form of the backend
    ended_starts: int = 0  # the number of starts that ended during its test
    # Time of forward and backward through one layer of each kind; None if it was not timed.
    milliseconds: float | None = None

    def backends(self) -> dict[str, str]:
        """Returns {operator: backend} for the operator and, if it is a mixer, for its parts."""
        parts = operators.parts_with(self.operator, self.backend)
        return dict.fromkeys([self.operator, *parts], self.backend)


@dataclass
class KernelRecord:
    """The content of kernels.json."""

    made_for: list[str] = field(default_factory=list)  # the result of KernelSelector.dependencies
    candidates: list[Candidate] = field(default_factory=list)
    choice: BackendChoice = field(default_factory=BackendChoice)  # empty before the selection

    @classmethod
    def read(cls, path: Path) -> "KernelRecord":
        """Reads the file. Returns an empty record if there is no file. Raises UserError if the file is damaged."""
        try:
            return read_object(path, cls, "delete it to choose backends again")
        except FileNotFoundError:
            return cls()

    def write(self, path: Path, write: Write) -> None:
        """Writes the file with `write`. In a run folder this is `Lease.write`."""
        write(path, json.dumps(dataclasses.asdict(self), indent=1) + "\n")

    def rejected(self) -> dict[tuple[str, str], str]:
        """Returns {(operator, backend): reason} of the rejected candidates."""
        return {
            (each.operator, each.backend): each.verdict
            for each in self.candidates
            if each.verdict not in ("", RIGHT)
        }

    def working_operators(self) -> set[str]:
        """Returns the operators that have a correct candidate."""
        return {each.operator for each in self.candidates if each.verdict == RIGHT}

    def use_simpler_forms(self) -> None:
        """Switches this process to the simpler form of each backend that was tested in this form."""
        for candidate in self.candidates:
            if candidate.simpler:
                operators.use_simpler_form(candidate.operator, candidate.backend)


class KernelSelector:
    """Selects the backends for the settings of a run on a device.

    is_sharded: see LayerCheck.
    """

    def __init__(
        self, settings: TrainConfig, device: torch.device, is_sharded: bool = False
    ) -> None:
        self.settings = settings
        self.device = device.type
        self.kernels = settings.training.kernels
        self.uses = settings.operator_uses(device.type)
        self.request = f"kernels={self.kernels} for {self.uses}"
        self.demanded = operators.demands(self.kernels, self.uses)
        self.layers = LayerCheck(settings, device, is_sharded)
        self.record = KernelRecord()
        self.path: Path | None = None  # the path of the run's kernels.json
        self.write: Write = write_atomically  # the function that replaces this file

    def dependencies(self) -> list[str]:
        """Returns everything that can change which backends are correct and fast, such as the shapes and the driver."""
        conditions = [
            self.request,
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

    # Steps 1 and 2: verdicts

    def validate_candidates(self, first_only: bool = False) -> None:
        """Tests the candidates and records their verdicts.

        first_only: whether to stop testing the candidates of an operator after the first correct one. Raises
        TransientError if a candidate can't be tested now, for example because the GPU is out of memory.
        """
        record = self.record
        if not record.candidates:
            found = operators.candidates(self.demanded, self.device, self.uses)
            for operator, backend in found:
                simpler = operators.demands_simpler_form(self.kernels, operator)
                record.candidates.append(Candidate(operator, backend, simpler=simpler))
        record.use_simpler_forms()
        for candidate in record.candidates:
            if candidate.ended_starts >= MAX_ENDED_STARTS:
                candidate.verdict = "earlier starts hung or ended while it was tested"
            elif candidate.verdict:
                continue
            elif candidate.backends().items() & record.rejected().keys():
                candidate.verdict = "one of its parts was rejected"
            elif not first_only or candidate.operator not in record.working_operators():
                with self.attempt(candidate):
                    candidate.verdict = self.validate(candidate)

    @contextlib.contextmanager
    def attempt(self, candidate: Candidate) -> Iterator[None]:
        """Records in kernels.json that the candidate is being tested during the block.

        If the process ends in the block, or if the GPU is lost, `ended_starts` of the candidate counts this start. If the
        test stalls, `ended_starts` becomes MAX_ENDED_STARTS, and the next start rejects the candidate.
        """
        before = candidate.ended_starts

        def note(ended_starts: int) -> None:
            candidate.ended_starts = ended_starts
            if self.path:
                self.record.write(self.path, self.write)

        note(before + 1)
        progress.on_stall = partial(note, MAX_ENDED_STARTS)
        try:
            yield
        except GpuLostError:
            before += 1
            raise
        finally:
            progress.on_stall = None
            note(before)

    def validate(self, candidate: Candidate) -> str:
        """Tests a candidate and returns its verdict. If its usual form fails, tests its simpler form, if it has one."""
        wrong, _ = self.layers.check(REFERENCE | candidate.backends())
        if not wrong:
            return RIGHT
        if candidate.simpler or not operators.use_simpler_form(
            candidate.operator, candidate.backend
        ):
            return wrong
        candidate.simpler = True
        return self.validate(candidate)

    # Step 3: selection

    def resolve(self, preferred: Mapping[str, str] = {}) -> BackendChoice:
        """Selects a backend for each operator among the correct candidates.

        preferred: {operator: backend} to prefer.
        """
        failed = self.record.rejected()
        return resolve_backends(
            self.kernels, self.device, self.uses, failed=failed, preferred=preferred
        )

    def select_fastest(self) -> tuple[BackendChoice, str]:
        """Times the correct candidates. Returns (the fastest selection, a description of the timing for the log).

        Raises UserError if only plain PyTorch is left for a scan and the settings do not demand it, because a step
        would take minutes. There are two exceptions. SSD in fp32 consists of matrix products, and PyTorch computes them
        fast. Gated DeltaNet does not have kernels on every stack and GPU.
        """
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
            return (
                best,
                "tested, not timed: one correct backend per operator, or deterministic=true",
            )
        least = self.layers.milliseconds(best.backends)
        for rival in rivals:
            choice = self.resolve(best.backends | rival.backends())
            with self.attempt(rival):
                rival.milliseconds = self.layers.milliseconds(choice.backends)
            if rival.milliseconds < least:
                best = choice
                least = rival.milliseconds
        return best, f"tested, and the fastest of {1 + len(rivals)} combinations"

    # Step 4: storage

    def select_kernels(self, folder: Path, write: Write) -> tuple[KernelRecord, str]:
        """Returns (the record with the selection, a description of its origin for the log). Only rank 0 calls it.

        Uses the selection in the run folder, or one stored by an earlier run, or else makes a new one. folder: the run
        folder. write: replaces a file in it. Raises UserError if no backend is usable for an operator.
        """
        self.write = write
        self.path = folder / KERNELS
        self.record = KernelRecord.read(self.path)
        if self.record.choice.backends and self.request in self.record.made_for:
            return self.record, "chosen when this run began"
        made_for = self.dependencies()
        identity = hashlib.sha256(repr(made_for).encode()).hexdigest()
        shared = folder.parent / CACHES / "kernels" / f"{identity}.json"
        earlier = KernelRecord.read(shared)
        if earlier.choice.backends:
            earlier.write(self.path, write)
            return earlier, f"chosen for an earlier run ({shared})"
        if self.record.made_for != made_for:
            self.record = KernelRecord(made_for)
        self.validate_candidates()
        self.record.choice, origin = self.select_fastest()
        self.record.write(self.path, write)
        if not any(candidate.ended_starts for candidate in self.record.candidates):
            # The file only spares later runs the tests, so an error is ignored.
            with contextlib.suppress(OSError):
                make_folder(shared.parent, parents=True)
                self.record.write(shared, write_atomically)
        return self.record, origin

    # Step 5: tests at every start

    def verify(self, record: KernelRecord) -> tuple[str, str]:
        """Tests the selected backends on this rank. Returns (a text about the device and the tests, a hash of the
        results).

        The hash is "" if the results of a backend are not reproducible. Raises UserError if a backend fails.
        """
        record.use_simpler_forms()
        backends = record.choice.backends
        wrong, bits = self.layers.check(backends)
        if wrong:
            raise UserError(f"{rank_and_host()}: {wrong}")
        self.layers.expected.clear()
        torch.cuda.empty_cache()  # does nothing without a GPU
        if not is_reproducible(self.settings, backends):
            bits = ""
        return f"{local_machine().device} {self.layers.tests}", bits


def is_reproducible(settings: TrainConfig, backends: Mapping[str, str]) -> bool:
    """Returns whether these backends compute bitwise the same results each time on a GPU."""
    fused = any(backends.get(operator) == "fused" for operator in VARIES)
    return settings.training.deterministic or not (fused or settings.model.has_mixer("attention"))


def select_for_inference(settings: TrainConfig, device: torch.device) -> BackendChoice:
    """Selects the backends for inference. Nothing is timed or stored."""
    selector = KernelSelector(settings, device)
    selector.layers.tests = []
    selector.layers.reads = READS + READS_AFTER_STATE
    if device.type in TESTED_DEVICES:
        selector.validate_candidates(first_only=True)
    return selector.resolve()


def test_node_kernels(settings: TrainConfig, folder: Path) -> str:
    """Tests the backends that a run has selected on each GPU of this node, from one process.

    folder: the run folder. Returns a sentence about the result. Raises UserError if a backend fails.
    """
    record = KernelRecord.read(folder / KERNELS)
    if not record.choice.backends:
        return "the run has chosen no kernels yet"
    for index in range(torch.cuda.device_count()):
        device = torch.device("cuda", index)
        torch.cuda.set_device(device)
        KernelSelector(settings, device).verify(record)
    return f"the run's kernels are correct on {format_count(torch.cuda.device_count(), 'GPU')}"


def run_on_all_nodes(world: World, work: Callable[..., T], *inputs: Any) -> T:
    """Runs `work(*inputs)` on all ranks, and returns its result on this rank.

    If `work` raises UserError on some of the nodes, raises NodeFault on the ranks that failed and TransientError on all
    others, so that the job continues without the nodes that failed. If `work` fails on all nodes, raises UserError on all
    ranks.
    """
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

    def raise_own_failure() -> None:
        if failures:
            raise failures[0]

    world.on_all_ranks(raise_own_failure)
    raise AssertionError("all nodes have failed")


def select_kernels(
    settings: TrainConfig,
    world: World,
    strategy: str,
    folder: Path,
    write: Write = write_atomically,
) -> tuple[BackendChoice, str]:
    """Selects the backends on rank 0 and tests them on all ranks.

    Returns (the selection, a description of its origin and test for the log), the same on all ranks. strategy: see
    choose_strategy. folder: the run folder. write: replaces a file in it. Raises UserError on all ranks if no backend is
    usable for an operator, or if a selected backend fails on a rank.
    """
    began = time.perf_counter()
    selector = KernelSelector(settings, world.device, strategy in SHARDED_STRATEGIES)
    record, origin = world.on_rank0(selector.select_kernels, folder, write)

    try:
        tested, bits = run_on_all_nodes(world, selector.verify, record)
        tested0, bits0, where0 = world.broadcast_object((tested, bits, rank_and_host()))

        def compare() -> None:
            if tested == tested0 and bits != bits0:
                raise UserError(
                    f"{rank_and_host()}: the results are not bitwise equal to the results of {where0}"
                )

        run_on_all_nodes(world, compare)
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
