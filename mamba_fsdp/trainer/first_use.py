"""The choice of backends in the first minute on a GPU: they are tested there, the correct ones are timed, and the
fastest are chosen.

1. Rank 0 tests each backend of each operator: one layer of each kind of the model, between an embedding and a loss,
   goes forward and backward in the run's precision over rows like the run's, and is compared with the reference in
   float64. If the model hands states to the next token or the next rank, the end of a row is tested too, from the
   state before it.
2. A backend that gives wrong results, does not compile or raises an error is passed over, with a message. If only the
   reference is left for a scan, the run stops. A backend whose test hangs until the watchdog ends the process is passed
   over at the next start. If the process ends in another way during the test, the backend is passed over at the third
   start: a time limit or a person may have ended the process.
3. The correct backends are timed at the run's shapes. With deterministic=true, the first one whose results repeat is
   chosen instead.
4. The run keeps the choice for all its starts. It is also stored beside the runs, for later runs with the same GPU and
   software.
5. At every start, each rank tests the chosen backends. An error names the rank whose results are wrong or differ in
   bits.

A model that is not trained (evaluate, generate) takes the first correct backends.
"""

import contextlib
import dataclasses
import hashlib
import json
import math
import os
import socket
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from mamba_fsdp.conventions import DTYPES
from mamba_fsdp.data.loader import own_positions
from mamba_fsdp.errors import UserError, first_line
from mamba_fsdp.heartbeat import heart
from mamba_fsdp.model.lm import MambaLM
from mamba_fsdp.ops import backends as known
from mamba_fsdp.ops.attention import Documents
from mamba_fsdp.ops.backends import MIXER_PARTS, REFERENCE, BackendChoice, resolve_backends
from mamba_fsdp.parallel.world import World
from mamba_fsdp.run_layout import CACHES, KERNELS
from mamba_fsdp.settings.train_config import TrainConfig
from mamba_fsdp.storage import read_object, write_atomically

DEVICES = {"cuda"}  # on which backends are tested before use
POSITIONS = 600  # of a row, which SSD may cut in two; no multiple of any kernel's chunk
VOCABULARY = 1009  # prime: each position of a row has its own token, and so its own gradient; no two rows are alike
FULL = 32768  # rows times channels that fill a GPU; kernels cut the rows if there are fewer
# The largest error allowed for a tensor of a layer's results, relative to the tensor's largest value. If MARGIN times
# the error of plain PyTorch in the run's precision is larger, as in layers of a few channels, that is allowed. In layers
# of usual sizes, plain PyTorch is off by half of these bounds, and a wrong sign by seven times as much or more. In fp32,
# products in TF32 exceed the bound.
BOUNDS = {torch.float32: 1e-4, torch.float16: 0.01, torch.bfloat16: 0.05}
MARGIN = 4
LOOSEST = 0.5  # no error above this is allowed: on a faulty GPU, plain PyTorch is wrong too
WARM_UP, ROUNDS = 2, 5
ENDED_STARTS = 2  # starts that ended during the same trial before it is passed over

Results = dict[str, torch.Tensor]
Reasons = dict[str, dict[str, str]]  # operator -> {backend: why it was passed over}


@dataclass
class Record:
    """The contents of kernels.json: the chosen backends, and the circumstances and trials behind the choice."""

    made_for: dict[str, Any]
    backends: dict[str, str] = field(default_factory=dict)  # empty before they are chosen
    passed: Reasons = field(default_factory=dict)
    milliseconds: dict[str, float] = field(default_factory=dict)  # of a layer of each kind
    under_way: list[str] = field(default_factory=list)  # trials during which a start ended
    simpler: list[str] = field(default_factory=list)  # operators in their backend's simpler form

    def write(self, path: Path) -> None:
        write_atomically(path, json.dumps(dataclasses.asdict(self), indent=1) + "\n")

    @contextlib.contextmanager
    def trying(self, what: str, path: Path | None) -> Iterator[None]:
        """Returns a context manager for the trial `what`. While it is under way, the file says so; if the process ends
        inside, the next start knows. Raises UserError if earlier starts ended in this trial."""
        if self.under_way.count(what) >= ENDED_STARTS:
            raise UserError("earlier starts hung or ended while it was tried")
        ended_before = list(self.under_way)

        def note(starts: int) -> None:
            self.under_way = ended_before + [what] * starts
            if path:
                self.write(path)

        note(1)
        heart.if_stuck = partial(note, ENDED_STARTS)
        try:
            yield
        finally:
            heart.if_stuck = None
            self.under_way = ended_before

    @classmethod
    def read(cls, path: Path) -> "Record | None":
        try:
            return read_object(path, cls, "delete it to choose backends again")
        except FileNotFoundError:
            return None


@dataclass
class Measured:
    """The comparison of a layer's results with those in float64."""

    worst: str  # the tensor with the largest error relative to its bound
    error: float  # relative to the tensor's largest value
    bound: float  # of the error
    sums: list[int]  # checksums: equal for equal bits


class Unusable(UserError):
    """The error of a device that only a new process can use again; the launcher starts one."""

    exit_code = 1


class FirstUse:
    """The choice of backends for the settings of a run, on a device."""

    def __init__(self, settings: TrainConfig, device: torch.device) -> None:
        training = settings.training
        self.model = settings.model
        self.device = device
        self.kernels = training.kernels
        self.deterministic = training.deterministic
        self.seq_idx = settings.data.reset_at_documents
        # Positions at the end of a row that are tested from the state before them, as a rank's part of a sequence or
        # one generated token is; 0 if the model hands on no state.
        self.continued = POSITIONS // 2 if settings.parallel.context_parallel > 1 else 0
        self.dtype = DTYPES[training.mixed_precision]
        self.shape = (training.batch_size, own_positions(settings))
        # Rows of a test: kernels cut rows, or not, as in the run; other kernels run in each case.
        self.rows = min(training.batch_size, 1 + FULL // self.model.d_inner)
        self.uses = settings.operator_uses()
        self.demanded = known.demands(self.kernels, self.uses)
        kinds = dict.fromkeys(self.model.layer_list())
        self.layers = [layer.mixer + "+mlp" * layer.mlp for layer in kinds]
        # For each kind of layer: its results in float64, and the bound of each tensor's error.
        self.exact: dict[str, tuple[Results, dict[str, float]]] = {}

    def circumstances(self) -> dict[str, Any]:
        """Returns everything that decides which backends are correct and fast."""
        circumstances = {
            "GPU": self.device_name(),
            "ptxas": os.environ.get("TRITON_PTXAS_PATH", ""),
        }
        with contextlib.suppress(OSError):
            circumstances["driver"] = Path("/proc/driver/nvidia/version").read_text()
        for package in ("torch", "triton", "mamba-ssm", "causal-conv1d"):
            with contextlib.suppress(metadata.PackageNotFoundError):
                circumstances[package] = metadata.version(package)
        code = hashlib.sha256()
        for room in ("ops", "model"):
            for source in sorted(Path(__file__).parents[1].glob(f"{room}/**/*.py")):
                code.update(source.read_bytes())
        return circumstances | {
            "code": code.hexdigest()[:16],
            "kernels": self.kernels,
            "uses": repr(self.uses),
            "batch_size, seq_length": self.shape,
            "model": vars(self.model),
        }

    def device_name(self) -> str:
        return torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "cpu"

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    # 1. Testing

    def make_model(
        self, layers: list[str], backends: dict[str, str], exact: bool = False, **sizes: Any
    ) -> MambaLM:
        """Returns a model of these layers. Its weights are so large that each operator matters to the gradients.

        exact: in float64. sizes: fields of ModelConfig that differ from the run's."""
        sizes |= {"layers": ",".join(layers), "n_layer": len(layers)}
        with self.device:
            model = MambaLM(
                dataclasses.replace(self.model, **sizes),
                backends=backends,
                compute_dtype=torch.float64 if exact else self.dtype,
                reset_at_documents=self.seq_idx,
            )
        generator = torch.Generator(self.device).manual_seed(0)
        in_fp32 = model.fp32_parameter_names()
        for name, parameter in model.named_parameters():
            value = torch.randn(parameter.shape, generator=generator, device=self.device)
            if value.dim() == 2:
                value /= math.sqrt(value.shape[1])
            if name.endswith(("dt_bias", "dt_proj.bias")):
                value -= 3  # states live for dozens of positions
            if name not in in_fp32:
                value = value.to(self.dtype)
            parameter.data = value.double() if exact else value
        return model

    def run(self, model: MambaLM, batch: int, length: int = POSITIONS) -> Results:
        """Returns the loss of made-up tokens, three documents a row, and the gradient of each parameter."""
        heart.beat()
        places = torch.arange(batch * length, device=self.device).view(batch, length)
        tokens = places * 7 % model.config.vocab_size
        labels = places * 11 % model.config.vocab_size
        seq_idx = None
        if self.seq_idx:
            seq_idx = (places % length * 3 // length).int()
        loss = model(tokens, labels, seq_idx)
        return {"loss": loss.detach()} | self.gradients(model, loss)

    def gradients(self, model: MambaLM, loss: torch.Tensor, of_what: str = "") -> Results:
        names, parameters = zip(*model.named_parameters())
        results = {}
        for name, gradient in zip(names, torch.autograd.grad(loss, parameters)):
            results[f"gradient of {name.removeprefix('backbone.layers.0.')}{of_what}"] = gradient
        self.synchronize()
        return results

    def continue_row(self, model: MambaLM) -> Results:
        """Returns the output of the end of a row, from the state that the row's beginning leaves. If ranks share
        sequences, also returns the gradient of each parameter, which passes through that state."""
        tokens = torch.arange(POSITIONS, device=self.device)[None]
        beginning, end = tokens.split([POSITIONS - self.continued, self.continued], dim=1)
        documents = None
        is_learnt_from = self.continued > 1
        if is_learnt_from:  # in training, the loader gives the documents
            documents = Documents.asked_by_last(torch.zeros_like(tokens), self.continued)
        state = model.allocate_state(1, POSITIONS)
        with torch.set_grad_enabled(is_learnt_from):
            model.read(beginning, state=state)
            output = model.final_norm(*model.read(end, documents=documents, state=state))
        results = {"output from a state": output.detach()}
        if is_learnt_from:
            results |= self.gradients(model, model.loss(output, end), " from a state")
        return results

    def results(self, layer: str, backends: dict[str, str], exact: bool = False) -> Results:
        """Returns the results of a kind of layer over the rows of a test."""
        sizes = {"vocab_size": VOCABULARY, "tie_embeddings": False}
        model = self.make_model([layer], backends, exact, **sizes)
        results = self.run(model, self.rows)
        if self.continued:
            results |= self.continue_row(model)
        return results

    def measure(self, layer: str, backends: dict[str, str]) -> Measured:
        """Returns how the results of a kind of layer with these backends compare with the reference in float64."""
        if layer not in self.exact:
            exact = self.results(layer, REFERENCE, True)
            plain = self.results(layer, REFERENCE)
            bounds = {}
            for name, error in relative_errors(plain, exact).items():
                bounds[name] = max(BOUNDS[self.dtype], min(MARGIN * error, LOOSEST))
            self.exact[layer] = (exact, bounds)
        exact, bounds = self.exact[layer]
        results = self.results(layer, backends)
        errors = relative_errors(results, exact)
        shares = {name: errors[name] / bounds[name] for name in errors}
        worst = max(shares, key=shares.__getitem__)
        sums = [int(tensor.reshape(-1).view(torch.uint8).sum()) for tensor in results.values()]
        return Measured(worst, errors[worst], bounds[worst], sums)

    def check(self, backends: dict[str, str]) -> list[int]:
        """Returns checksums of the results of each kind of layer, equal for equal bits. Raises UserError for a wrong
        tensor or any other error."""
        sums = []
        for layer in self.layers:
            try:
                measured = self.measure(layer, backends)
                repeats = not self.deterministic or self.measure(layer, backends) == measured
            except Exception as error:  # of a compiler, a driver or a library
                raise self.explained(error) from error
            if measured.error > measured.bound:
                off = f"off by {measured.error:.1g} of its largest value"
                raise UserError(f"{measured.worst} is {off}; {measured.bound:.1g} is allowed")
            if not repeats:
                raise UserError("its results do not repeat bit for bit")
            sums += measured.sums
        return sums

    def explained(self, error: Exception) -> UserError:
        message = f"{type(error).__name__}: {first_line(error)}"
        try:
            self.synchronize()
        except RuntimeError:
            return Unusable(f"{message}, and the GPU is lost to this process; start again")
        return UserError(message)

    def prove(self, record: Record, path: Path | None = None) -> Reasons:
        """Returns the backends that failed, and why. path: where the record is written before each trial."""
        failed: Reasons = {}
        right: set[tuple[str, str]] = set()
        for operator, backend in known.candidates(self.demanded, self.device.type, self.uses):
            parts = known.parts_with(operator, backend)
            if not right.issuperset((part, backend) for part in parts):
                continue  # a mixer uses the backend of its parts
            backends = REFERENCE | dict.fromkeys([operator, *parts], backend)
            trial = f"{operator} {backend}"
            wrong = self.why_wrong(backends, record, trial, path)
            use_simpler = known.simpler_form(operator, backend)
            if wrong and use_simpler:
                use_simpler()
                if not self.why_wrong(backends, record, f"{trial}, simpler", path):
                    record.simpler.append(operator)
                    wrong = ""
            if wrong:
                failed.setdefault(operator, {})[backend] = wrong
            else:
                right.add((operator, backend))
        return failed

    def why_wrong(
        self, backends: dict[str, str], record: Record, trial: str, path: Path | None
    ) -> str:
        """Returns why these backends failed the test, or "" if they are correct."""
        try:
            with record.trying(trial, path):
                self.check(backends)
        except Unusable:
            raise
        except UserError as error:
            return str(error)
        return ""

    # 2. and 3. Choosing

    def resolve(self, failed: Reasons, preferred: str = "") -> BackendChoice:
        """Returns the choice without the failed backends. Raises UserError if only plain PyTorch is left for a scan and
        the settings do not demand it: a step would take minutes. SSD in fp32 is excepted: it is matrix products, which
        PyTorch computes well."""
        device = self.device.type
        choice = resolve_backends(self.kernels, device, self.uses, (), failed, preferred)
        for operator in {"scan", "ssd"} & choice.backends.keys() - self.demanded.keys():
            is_good = operator == "ssd" and self.dtype == torch.float32
            if choice.backends[operator] == "reference" and not is_good:
                raise UserError(
                    f"only plain PyTorch is left for {operator}, far too slow to train with here "
                    f"({choice}); install mamba-ssm and causal-conv1d (an image with INSTALL_KERNELS=1), or Triton and a "
                    f"C compiler; kernels={operator}=reference uses it anyway"
                )
        return choice

    def fastest(self, record: Record, failed: Reasons, path: Path) -> BackendChoice:
        """Returns the faster of two choices: the default order of the backends, and Triton before all others."""
        first = self.resolve(failed)
        other = self.resolve(failed, preferred="triton")
        if self.deterministic or first.backends == other.backends:
            return first
        times = []
        for choice in (first, other):
            name = str(BackendChoice(choice.backends))
            times.append(math.inf)
            with contextlib.suppress(UserError, torch.cuda.OutOfMemoryError):
                with record.trying(name, path):
                    times[-1] = self.milliseconds(choice.backends)
            record.milliseconds[name] = times[-1]
        return other if times[1] < times[0] else first

    def milliseconds(self, backends: dict[str, str]) -> float:
        """Returns the time of forward and backward through one layer of each kind, at the run's shapes."""
        model = self.make_model(self.layers, backends)
        times = []
        for _ in range(WARM_UP + ROUNDS):
            began = time.perf_counter()
            self.run(model, *self.shape)
            times.append(1e3 * (time.perf_counter() - began))
        return statistics.median(times[WARM_UP:])

    # 4. Keeping

    def choose(self, folder: Path) -> tuple[Record, str]:
        """Returns the choice and, in words, where it comes from; rank 0 calls it. Raises UserError if no backend can be
        used for an operator."""
        own = folder / KERNELS
        record = Record.read(own) or Record({})
        same_operators = record.backends.keys() | MIXER_PARTS == self.uses.keys() | MIXER_PARTS
        if same_operators and record.made_for["kernels"] == self.kernels:
            return record, "chosen when this run began"
        record = Record(self.circumstances(), under_way=record.under_way)
        identity = hashlib.sha256(repr(record.made_for).encode()).hexdigest()
        shared = folder.parent / CACHES / "kernels" / f"{identity[:16]}.json"
        earlier = Record.read(shared)
        if earlier:
            earlier.write(own)
            return earlier, f"chosen for an earlier run ({shared})"
        choice = self.fastest(record, self.prove(record, own), own)
        record.backends = choice.backends
        record.passed = choice.passed
        record.write(own)
        with contextlib.suppress(OSError):  # without it, the next run tests by itself
            shared.parent.mkdir(parents=True, exist_ok=True)
            record.write(shared)
        return record, "tested and timed"

    # 5. At every start

    def examine(self, backends: dict[str, str]) -> tuple[str, str]:
        """Returns (this device's name, a digest of the results' bits, or "" if a backend's results don't repeat).
        Raises UserError if a chosen backend is unavailable or wrong on this rank."""
        repeats = self.deterministic or not self.model.has("attention")
        for operator, backend in backends.items():
            uses = self.uses[operator]
            reason = known.why_not(operator, backend, uses)
            if reason:
                raise UserError(f"{operator} can't be {backend}: {reason}")
            strict = [dataclasses.replace(use, deterministic=True) for use in uses]
            repeats = repeats and not known.why_not(operator, backend, strict)
        sums = self.check(backends)
        self.exact.clear()
        torch.cuda.empty_cache()  # does nothing without a GPU
        digest = hashlib.sha256(repr(sums).encode()).hexdigest()
        return self.device_name(), digest if repeats else ""


def relative_errors(found: Results, exact: Results) -> dict[str, float]:
    """Returns the largest difference over the largest value of each tensor. NaN counts as infinite."""
    errors = {}
    for name, true in exact.items():
        error = (found[name].double() - true).abs().max() / true.abs().max().clamp(min=1e-30)
        errors[name] = float(error.nan_to_num(nan=math.inf))
    return errors


def choose_for_answers(settings: TrainConfig, device: torch.device) -> BackendChoice:
    """Returns the backends for a model that is not trained. Nothing is timed or stored."""
    use = FirstUse(settings, device)
    use.continued = 1  # generate computes one token after the other
    failed: Reasons = {}
    if device.type in DEVICES:
        failed = use.prove(Record({}))
    return resolve_backends(use.kernels, device.type, use.uses, failed=failed)


def choose(settings: TrainConfig, world: World, folder: Path) -> tuple[BackendChoice, str]:
    """Returns the same choice on all ranks and, in words, where it comes from. Raises UserError on all ranks if there
    is no choice or it fails on any rank."""
    began = time.perf_counter()
    here = f"rank {world.rank} on {socket.gethostname()}"
    use = FirstUse(settings, world.device)
    record, origin = world.on_rank0(partial(use.choose, folder))

    def examine() -> tuple[str, str]:
        for operator in record.simpler:
            use_simpler = known.simpler_form(operator, record.backends[operator])
            if use_simpler:
                use_simpler()
        try:
            return use.examine(record.backends)
        except UserError as error:
            raise UserError(f"{here}: {error}") from error

    def compare() -> None:
        if device == device0 and bits != bits0:
            raise UserError(f"{here}: its bits differ from those of {where0}")

    try:
        device, bits = world.on_all_ranks(examine)
        device0, bits0, where0 = world.broadcast_object((device, bits, here))
        world.on_all_ranks(compare)
    except UserError as error:
        raise UserError(
            f"the chosen kernels fail on {error}. If only one node fails, its GPU or its installation is faulty: "
            f"exclude it (--exclude=NODE). Otherwise delete {folder / KERNELS} and {folder.parent / CACHES}/kernels; "
            "kernels are then chosen again, and results differ in their last bits"
        ) from None
    seconds = time.perf_counter() - began
    summary = f"{origin}; correct on all {world.size} ranks, {seconds:.1f} s"
    return BackendChoice(record.backends, record.passed), summary
