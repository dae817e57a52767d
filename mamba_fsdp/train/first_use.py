"""The first minute on a GPU: what could serve is proved there, what is right is timed, and the fastest is taken.

1. Rank 0 proves each backend of each operator: one layer of each kind of the model, between an embedding and a loss, goes
   forward and backward in the run's precision over one row, beside the reference in float64.
2. What is wrong, does not compile or raises is passed over, and said. Where nothing but the reference is left for a scan,
   the run stops. What ends the process, or hangs until the watchdog ends it, is passed over at the run's third start.
3. What is right is timed at the run's shapes. deterministic=true takes the first that repeats instead.
4. The choice is kept in the run, which stays with it, and beside the runs, for others with such a GPU and such software.
5. At every start each rank proves what was chosen; those whose results are wrong, or have other bits, are named.
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
from dataclasses import dataclass, field
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from config.train_config import TrainConfig
from mamba_fsdp.conventions import DTYPES
from mamba_fsdp.errors import UserError, first_line
from mamba_fsdp.heartbeat import heart
from mamba_fsdp.model.lm import MambaLM
from mamba_fsdp.model.spec import operator_uses
from mamba_fsdp.ops import backends as known
from mamba_fsdp.ops.backends import MIXER_PARTS, REFERENCE, Choice, resolve_backends
from mamba_fsdp.parallel.world import World
from mamba_fsdp.run_layout import CACHES, KERNELS
from mamba_fsdp.storage import read_object, write_atomically

DEVICES = {"cuda"}  # on which backends have to prove themselves
POSITIONS = 300  # no multiple of any kernel's block
VOCABULARY = (
    1000  # at most: each position has a token of its own, so that its gradient is seen by itself
)
# Of each tensor of a layer's results, the largest error relative to its largest value; or MARGIN times that of plain
# PyTorch in the run's precision, where this is more, as in layers of a few channels. Plain PyTorch comes to half of these
# in layers of usual sizes, a wrong sign to seven times as much and more. In fp32, products in TF32 are too much.
BOUNDS = {torch.float32: 1e-4, torch.float16: 0.01, torch.bfloat16: 0.05}
MARGIN = 4
LOOSEST = 0.5  # a faulty GPU fails plain PyTorch too
WARM_UP, ROUNDS = 2, 5
ENDED_STARTS = 2  # in the same trial, before it is passed over

Results = dict[str, torch.Tensor]
Reasons = dict[str, dict[str, str]]  # operator -> {backend: why it was passed over}


@dataclass
class Record:
    """kernels.json: what was chosen, for what, and why."""

    made_for: dict[str, Any]
    backends: dict[str, str] = field(default_factory=dict)  # empty before they are chosen
    passed: Reasons = field(default_factory=dict)
    milliseconds: dict[str, float] = field(default_factory=dict)  # of a layer of each kind
    under_way: list[str] = field(default_factory=list)  # trials in which a start has ended

    def write(self, path: Path) -> None:
        write_atomically(path, json.dumps(dataclasses.asdict(self), indent=1) + "\n")

    @classmethod
    def read(cls, path: Path) -> "Record | None":
        like = dataclasses.asdict(cls({}, {"": ""}, {"": {"": ""}}, {"": 0.0}, [""]))
        try:
            return cls(**read_object(path, like, "delete it, and backends are chosen anew"))
        except FileNotFoundError:
            return None


@dataclass
class Measured:
    """A layer's results beside those in float64."""

    worst: str  # the tensor that is off most
    error: float  # relative to its largest value
    bound: float  # of the error
    repeats: bool  # bit for bit, where it is asked for
    sums: list[int]  # equal for equal bits


class Unusable(UserError):
    """A backend has left the device in a state that only a new process ends; the launcher starts one."""

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
        self.dtype = DTYPES[training.mixed_precision]
        self.shape = (training.batch_size, settings.data.seq_length)
        self.uses = operator_uses(self.model, self.dtype, self.seq_idx, self.deterministic)
        self.demanded = known.demands(self.kernels, self.uses)
        kinds = dict.fromkeys(self.model.layer_list())
        self.layers = [layer.mixer + "+mlp" * layer.mlp for layer in kinds]
        self.exact: dict[str, Results] = {}  # of a layer, in float64
        self.bounds: dict[str, dict[str, float]] = {}  # of the errors of a layer's results

    def circumstances(self) -> dict[str, Any]:
        """All that decides which backends are right and fast."""
        found = {"GPU": self.device_name(), "ptxas": os.environ.get("TRITON_PTXAS_PATH", "")}
        with contextlib.suppress(OSError):
            found["driver"] = Path("/proc/driver/nvidia/version").read_text()
        for package in ("torch", "triton", "mamba-ssm", "causal-conv1d"):
            with contextlib.suppress(metadata.PackageNotFoundError):
                found[package] = metadata.version(package)
        code = hashlib.sha256()
        for room in ("ops", "model"):
            for source in sorted(Path(__file__).parents[1].glob(f"{room}/**/*.py")):
                code.update(source.read_bytes())
        return found | {
            "code": code.hexdigest()[:16],
            "kernels": self.kernels,
            "deterministic": self.deterministic,
            "reset_at_documents": self.seq_idx,
            "dtype": str(self.dtype),
            "batch_size, seq_length": self.shape,
            "model": vars(self.model),
        }

    def device_name(self) -> str:
        return torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "cpu"

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    # 1. Proving

    def make_model(
        self, layers: list[str], backends: dict[str, str], exact: bool = False, **sizes: Any
    ) -> MambaLM:
        """Returns a model of these layers whose weights are so large that each operator matters to its gradients.

        exact: in float64. sizes: other fields of its ModelConfig."""
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

    def run(self, model: MambaLM, batch: int = 1, length: int = POSITIONS) -> Results:
        """Returns the loss of made-up tokens, three documents a row, and the gradient of each parameter."""
        heart.beat()
        places = torch.arange(batch * length, device=self.device).view(batch, length)
        tokens = places * 7 % model.config.vocab_size
        labels = places * 11 % model.config.vocab_size
        seq_idx = None
        if self.seq_idx:
            seq_idx = (places % length * 3 // length).int()
        loss = model(tokens, labels, seq_idx)
        names, parameters = zip(*model.named_parameters())
        results = {"loss": loss.detach()}
        for name, gradient in zip(names, torch.autograd.grad(loss, parameters)):
            results[f"gradient of {name.removeprefix('backbone.layers.0.')}"] = gradient
        self.synchronize()
        return results

    def measure(self, layer: str, backends: dict[str, str]) -> Measured:
        """Compares what a kind of layer gives in these backends with the reference in float64."""
        small: dict[str, Any] = {"vocab_size": VOCABULARY, "tie_embeddings": False}
        if layer not in self.exact:
            self.exact[layer] = self.run(self.make_model([layer], REFERENCE, True, **small))
            plain = self.run(self.make_model([layer], REFERENCE, **small))
            bounds = {}
            for name, error in relative_errors(plain, self.exact[layer]).items():
                bounds[name] = max(BOUNDS[self.dtype], min(MARGIN * error, LOOSEST))
            self.bounds[layer] = bounds
        model = self.make_model([layer], backends, **small)
        results = self.run(model)
        errors = relative_errors(results, self.exact[layer])
        bounds = self.bounds[layer]
        shares = {name: errors[name] / bounds[name] for name in errors}
        worst = max(shares, key=shares.__getitem__)
        sums = check_sums(results)
        repeats = not self.deterministic or check_sums(self.run(model)) == sums
        return Measured(worst, errors[worst], bounds[worst], repeats, sums)

    def check(self, backends: dict[str, str], operator: str = "") -> list[int]:
        """Measures each kind of layer (that has the operator). Returns numbers that are equal for equal bits; raises
        UserError where a tensor is wrong."""
        sums = []
        for layer in self.layers:
            config = dataclasses.replace(self.model, layers=layer)
            if operator and operator not in operator_uses(config, self.dtype):
                continue
            found = self.measure(layer, backends)
            if found.error > found.bound:
                off = f"{found.error:.1g} of its largest value off"
                raise UserError(f"{found.worst} is {off}, {found.bound:.1g} at most")
            if not found.repeats:
                raise UserError("it does not repeat bit for bit")
            sums += found.sums
        return sums

    def prove(self, record: Record, path: Path | None = None) -> Reasons:
        """Returns what failed. path: where the record is written before each trial."""
        failed: Reasons = {}
        right: set[tuple[str, str]] = set()
        for operator, backend in known.candidates(self.demanded, self.device.type, self.uses):
            parts = known.parts_with(operator, backend)
            if not right.issuperset((part, backend) for part in parts):
                continue  # a mixer has the backend of its parts
            trial = f"{operator} {backend}"
            wrong = "starts ended while it was tried"
            if record.under_way.count(trial) < ENDED_STARTS:
                record.under_way.append(trial)
                if path:
                    record.write(path)
                wrong = self.why_wrong(operator, backend)
                record.under_way.remove(trial)
            if wrong:
                failed.setdefault(operator, {})[backend] = wrong
            else:
                right.add((operator, backend))
        return failed

    def why_wrong(self, operator: str, backend: str) -> str:
        """Returns what a backend of an operator does wrong, "" where nothing."""
        tried = dict.fromkeys([operator, *known.parts_with(operator, backend)], backend)
        try:
            self.check(REFERENCE | tried, operator)
        except Exception as error:  # ours, a compiler's, a driver's, a library's
            wrong = explain(error)
            try:
                self.synchronize()
            except RuntimeError:
                said = f"{operator} {backend} made {self.device} unusable: {wrong}; a third start does without"
                raise Unusable(said) from error
            return wrong
        return ""

    # 2. and 3. Choosing

    def resolve(self, failed: Reasons, preferred: str = "") -> Choice:
        """Raises UserError where plain PyTorch is left for a scan and nobody demanded it: a step would take minutes. In
        fp32 SSD is matrix products, of which PyTorch's are good."""
        device = self.device.type
        choice = resolve_backends(self.kernels, device, self.uses, (), failed, preferred)
        for operator in {"scan", "ssd"} & choice.backends.keys() - self.demanded.keys():
            is_good = operator == "ssd" and self.dtype == torch.float32
            if choice.backends[operator] == "reference" and not is_good:
                raise UserError(
                    f"only plain PyTorch is left for {operator}, far too slow to train with here "
                    f"({choice}); install mamba-ssm and causal-conv1d (an image with INSTALL_KERNELS=1), or Triton and a "
                    f"C compiler; kernels={operator}=reference takes it all the same"
                )
        return choice

    def fastest(self, record: Record, failed: Reasons) -> Choice:
        """Returns the faster of what comes first and what does with Triton before all others."""
        first = self.resolve(failed)
        other = self.resolve(failed, preferred="triton")
        if self.deterministic or first.backends == other.backends:
            return first
        times = [self.milliseconds(choice.backends) for choice in (first, other)]
        for choice, taken in zip((first, other), times):
            record.milliseconds[str(Choice(choice.backends))] = taken
        return other if times[1] < times[0] else first

    def milliseconds(self, backends: dict[str, str]) -> float:
        """Of forward and backward through a layer of each kind, at the run's shapes."""
        model = self.make_model(self.layers, backends)
        times = []
        for _ in range(WARM_UP + ROUNDS):
            began = time.perf_counter()
            self.run(model, *self.shape)
            times.append(1e3 * (time.perf_counter() - began))
        return statistics.median(times[WARM_UP:])

    # 4. Keeping

    def choose(self, folder: Path) -> tuple[Record, str]:
        """Returns what is chosen, on rank 0, and where it comes from. Raises UserError where nothing can serve."""
        own = folder / KERNELS
        record = Record.read(own) or Record({})
        same_operators = record.backends.keys() | MIXER_PARTS == self.uses.keys() | MIXER_PARTS
        if same_operators and record.made_for["kernels"] == self.kernels:
            return record, "as this run began"
        record = Record(self.circumstances(), under_way=record.under_way)
        identity = hashlib.sha256(repr(record.made_for).encode()).hexdigest()
        shared = folder.parent / CACHES / "kernels" / f"{identity[:16]}.json"
        found = Record.read(shared)
        if found:
            found.write(own)
            return found, f"as found before ({shared})"
        choice = self.fastest(record, self.prove(record, own))
        record.backends = choice.backends
        record.passed = choice.passed
        record.write(own)
        with contextlib.suppress(OSError):  # the next run finds out by itself
            shared.parent.mkdir(parents=True, exist_ok=True)
            record.write(shared)
        return record, "proved and timed"

    # 5. At every start

    def examine(self, backends: dict[str, str]) -> tuple[str, str]:
        """Returns (this device's name, what is equal for equal bits, "" where backends don't repeat). Raises UserError."""
        repeats = self.deterministic or not self.model.has("attention")
        try:
            for operator, backend in backends.items():
                uses = self.uses[operator]
                reason = known.why_not(operator, backend, uses)
                if reason:
                    raise UserError(f"{operator} can't be {backend}: {reason}")
                strict = [dataclasses.replace(use, deterministic=True) for use in uses]
                repeats = repeats and not known.why_not(operator, backend, strict)
            sums = self.check(backends)
        except Exception as error:
            raise UserError(explain(error)) from error
        finally:
            self.exact.clear()
            if self.device.type == "cuda":
                torch.cuda.empty_cache()
        digest = hashlib.sha256(repr(sums).encode()).hexdigest()
        return self.device_name(), digest if repeats else ""


def relative_errors(found: Results, exact: Results) -> dict[str, float]:
    """Of each tensor the largest difference over the largest value. NaN counts as infinite."""
    errors = {}
    for name, true in exact.items():
        error = (found[name].double() - true).abs().max() / true.abs().max().clamp(min=1e-30)
        errors[name] = float(error.nan_to_num(nan=math.inf))
    return errors


def check_sums(results: Results) -> list[int]:
    return [int(tensor.reshape(-1).view(torch.uint8).sum()) for tensor in results.values()]


def explain(error: Exception) -> str:
    if isinstance(error, UserError):
        return str(error)
    return f"{type(error).__name__}: {first_line(error)}"


def choose(settings: TrainConfig, world: World, folder: Path) -> tuple[Choice, str]:
    """Returns the same choice on all ranks, and where it comes from. Raises UserError on all ranks where there is none, or
    where it fails on any of them."""
    began = time.perf_counter()
    here = f"rank {world.rank} on {socket.gethostname()}"
    use = FirstUse(settings, world.device)
    record, origin = world.on_rank0(partial(use.choose, folder))

    def examine():
        try:
            return use.examine(record.backends)
        except UserError as error:
            raise UserError(f"{here}: {error}") from error

    def compare():
        if device == device0 and bits != bits0:
            raise UserError(f"{here}: other bits than {where0}")

    try:
        device, bits = world.on_all_ranks(examine)
        device0, bits0, where0 = world.broadcast_object((device, bits, here))
        world.on_all_ranks(compare)
    except UserError as error:
        raise UserError(
            f"the chosen kernels fail on {error}. Where one node is alone with it, its GPU or what is installed there is "
            f"faulty: leave it out (--exclude=NODE). Else delete {folder / KERNELS} and {folder.parent / CACHES}/kernels to "
            "choose anew, with other bits"
        ) from None
    seconds = time.perf_counter() - began
    said = f"{origin}, right on {world.size} ranks, {seconds:.1f} s"
    return Choice(record.backends, record.passed), said
