"""Tests a model's layers: compares their results with some backends to the reference in float64, on the device itself.

One layer of each kind of the model, between an embedding and a loss, goes forward and backward in the run's precision,
over rows for which Triton compiles the same code as for the run's. One row has the run's own length, if it fits the memory.
Further rows are read without gradients, as validation reads them. If the model hands states to the next rank, positions
after a state are tested too.
"""

import contextlib
import dataclasses
import hashlib
import math
import time
from typing import NamedTuple

import torch

from mamba_fsdp.conventions import DTYPES
from mamba_fsdp.errors import TransientError, first_line, out_of_memory_message
from mamba_fsdp.model.lm import MambaLM
from mamba_fsdp.ops.attention import Documents
from mamba_fsdp.ops.backends import REFERENCE
from mamba_fsdp.settings.train_config import TrainConfig
from mamba_fsdp.this_process import progress, rank_and_host

# Positions of a tested row, plus the run's modulo 16, on which the code that Triton compiles depends. SSD may cut the row
# in two, and it is no multiple of any kernel's chunk.
POSITIONS = 592
VOCABULARY = 1009  # prime: each position of a row has its own token, and so its own gradient; no two rows are alike
FULL = 32768  # rows times channels that fill a GPU; kernels cut the rows if there are fewer
# The largest error allowed for a tensor of a layer's results, relative to the tensor's largest value. If MARGIN times
# the error of plain PyTorch in the run's precision is larger, as in layers of a few channels, that is allowed. In layers
# of usual sizes, plain PyTorch is off by half of these bounds, and a wrong sign by seven times as much or more. In fp32,
# products in TF32 exceed the bound.
BOUNDS = {torch.float32: 1e-4, torch.float16: 0.01, torch.bfloat16: 0.05}
MARGIN = 4
LOOSEST = 0.5  # no error above this is allowed: on a faulty GPU, plain PyTorch is wrong too
ROUNDS = 7  # of timing

Results = dict[str, torch.Tensor]


class LostGpu(TransientError):
    """The error of a GPU that only a new process can use again."""


class Rows(NamedTuple):
    """Made-up rows."""

    batch: int
    positions: int
    before: int = 0  # positions that are read first, and hand on their state

    def __str__(self) -> str:
        return f"over {self.batch} x {self.positions} positions after {self.before}"


# Texts have any length. Triton compiles other code for short ones, and for lengths that 4 does not divide.
READS = [Rows(1, 1), Rows(1, 16), Rows(1, 17), Rows(1, 608), Rows(1, 609)]
READS_AFTER_STATE = [Rows(1, 1, before=1), Rows(1, 17, before=16), Rows(1, 609, before=608)]


class Measured(NamedTuple):
    """The comparison of a layer's results with float64: for the tensor with the largest share."""

    share: float  # of the error in what is allowed
    tensor: str
    error: float  # relative to the tensor's largest value
    allowed: float
    bits: str  # a hash of all results


class LayerCheck:
    """The check of the layers of a run's model on a device.

    kinds: of the layers. shape: the run's own rows. tests: the rows of the check. reads: its rows without gradients.
    is_sharded: whether sharding hands the weights to the operators in the run's precision; without it they come in fp32,
    for which Triton compiles other code."""

    def __init__(
        self, settings: TrainConfig, device: torch.device, is_sharded: bool = False
    ) -> None:
        training = settings.training
        own = settings.own_positions()
        self.model = settings.model
        self.device = device
        self.dtype = DTYPES[training.precision(device.type)]
        self.is_sharded = is_sharded
        self.deterministic = training.deterministic
        self.seq_idx = settings.data.reset_at_documents
        kinds = [layer.mixer + "+mlp" * layer.mlp for layer in self.model.layer_list()]
        self.kinds = list(dict.fromkeys(kinds))
        self.shape = Rows(training.batch_size, own)
        # Kernels cut rows, or not, as in the run; other kernels run in each case.
        batch = min(training.batch_size, 1 + FULL // self.model.d_inner)
        self.positions = POSITIONS + own % 16
        self.short = [Rows(batch, self.positions)]
        self.tests = [*self.short, Rows(1, own)]
        self.reads = READS
        if settings.parallel.context_parallel > 1:
            self.short.append(Rows(batch, self.positions, before=self.positions))
            self.tests = [*self.short, Rows(1, own), Rows(1, own, before=own)]
            self.reads = READS + READS_AFTER_STATE
        # For each kind of layer: the reference's results in float64, and in the run's precision.
        self.expected: dict[str, tuple[Results, Results]] = {}

    def make_model(
        self, kinds: list[str], backends: dict[str, str], exact: bool = False
    ) -> MambaLM:
        """Returns a model of a layer of each of these kinds; exact: in float64. Its weights are so large that each
        operator matters to the gradients."""
        config = dataclasses.replace(
            self.model,
            layers=",".join(kinds),
            n_layer=len(kinds),
            vocab_size=VOCABULARY,
            tie_embeddings=False,
        )
        with self.device:
            model = MambaLM(
                config,
                backends=backends,
                compute_dtype=torch.float64 if exact else self.dtype,
                reset_at_documents=self.seq_idx,
            )
        generator = torch.Generator(self.device).manual_seed(0)
        for name, parameter in model.named_parameters():
            value = parameter.data.normal_(generator=generator)
            if value.dim() == 2:
                value /= math.sqrt(value.shape[1])
            if name.endswith(("dt_bias", "dt_proj.bias")):
                value -= 3  # states live for dozens of positions
            if self.is_sharded and name not in model.fp32_parameter_names():
                value = value.to(self.dtype)
            parameter.data = value.double() if exact else value
        return model

    def run(self, model: MambaLM, rows: Rows) -> Results:
        """Returns the output of made-up tokens and, unless gradients are off, the gradient of each parameter. A row
        has three documents, or one if it begins with a state."""
        progress.touch()
        length = rows.before + rows.positions
        places = torch.arange(rows.batch * length, device=self.device).view(rows.batch, length)
        tokens = places * 7 % VOCABULARY
        own = tokens[:, rows.before :]
        seq_idx = None
        documents = None
        state = None
        if rows.before:
            state = model.allocate_state(rows.batch, length)
            model.run_blocks(tokens[:, : rows.before], state=state)
            documents = Documents.asked_by_last(torch.zeros_like(tokens), rows.positions)
        elif self.seq_idx:
            seq_idx = (places % length * 3 // length).int()
        output = model.final_norm(*model.run_blocks(own, seq_idx, documents, state))
        results = {f"output {rows}": output.detach()}
        if torch.is_grad_enabled():
            model.loss(output, own).backward()
            for name, parameter in model.named_parameters():
                name = name.removeprefix("backbone.layers.0.")
                results[f"gradient of {name} {rows}"] = parameter.grad
                parameter.grad = None
        return results

    def results(self, kind: str, backends: dict[str, str], exact: bool = False) -> Results:
        """Returns the results of a kind of layer in all tests."""
        model = self.make_model([kind], backends, exact)
        results: Results = {}
        for rows in self.tests:
            results |= self.run(model, rows)
        with torch.no_grad():
            for rows in self.reads:
                results |= self.run(model, rows)
        self.synchronize()
        return results

    def measure(self, kind: str, backends: dict[str, str]) -> Measured:
        """Returns how the results of a kind of layer with these backends compare with the reference in float64. Once rows
        of the run's own length do not fit the memory, they are left out."""
        with contextlib.suppress(torch.cuda.OutOfMemoryError):
            return self.compare(kind, backends)
        self.tests = self.short
        return self.compare(kind, backends)

    def compare(self, kind: str, backends: dict[str, str]) -> Measured:
        if kind not in self.expected:
            exact = self.results(kind, REFERENCE, True)
            self.expected[kind] = (exact, self.results(kind, REFERENCE))
        exact, plain = self.expected[kind]
        bits = hashlib.sha256()
        measured = []
        for name, tensor in self.results(kind, backends).items():
            bits.update(tensor.reshape(-1).view(torch.uint8).cpu().numpy())
            error = relative_error(tensor, exact[name])
            usual = relative_error(plain[name], exact[name])
            allowed = max(BOUNDS[self.dtype], min(MARGIN * usual, LOOSEST))
            measured.append((error / allowed, name, error, allowed))
        return Measured(*max(measured), bits.hexdigest())

    def check(self, backends: dict[str, str]) -> tuple[str, str]:
        """Returns (what is wrong with these backends, or "", a hash of the results of all kinds of layers). Raises TransientError
        for an error that tells nothing about them."""
        bits = ""
        for kind in self.kinds:
            try:
                measured = self.measure(kind, backends)
                repeats = not self.deterministic or self.measure(kind, backends) == measured
            except Exception as error:  # of a compiler, a driver or a library
                return self.explained(error), ""
            if measured.share > 1:
                off = f"off by {measured.error:.1g} of its largest value"
                return f"{measured.tensor} is {off}; {measured.allowed:.1g} is allowed", ""
            if not repeats:
                return "its results do not repeat bit for bit", ""
            bits += measured.bits
        return "", bits

    def explained(self, error: Exception) -> str:
        """Returns the error in a line. Raises TransientError if it tells nothing about the backends."""
        message = f"{type(error).__name__}: {first_line(error)}"
        try:
            self.synchronize()
        except RuntimeError:
            raise LostGpu(
                f"{rank_and_host()}: {message}, and the GPU is lost: start again"
            ) from error
        full = out_of_memory_message(error, rank_and_host())
        if full:
            raise TransientError(full) from error
        if isinstance(error, OSError):
            raise TransientError(
                f"{rank_and_host()}: {message}; not the fault of the kernels: start again"
            ) from error
        return message

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def milliseconds(self, backends: dict[str, str]) -> float:
        """Returns the time of forward and backward through a layer of each kind at the run's shape, infinite if that fails
        or does not fit the memory. As in a training, the host launches what follows while the device computes, so that
        the slower of the two counts."""
        try:
            model = self.make_model(self.kinds, backends)
            self.run(model, self.shape)  # compiles
            self.synchronize()
            began = time.perf_counter()
            for _ in range(ROUNDS):
                self.run(model, self.shape)
            self.synchronize()
            return 1e3 * (time.perf_counter() - began) / ROUNDS
        except torch.cuda.OutOfMemoryError:
            return math.inf
        except Exception as error:
            self.explained(error)  # raises TransientError
            return math.inf


def relative_error(found: torch.Tensor, exact: torch.Tensor) -> float:
    """Returns the largest difference over the largest value. NaN counts as infinite."""
    error = (found - exact).abs().max() / exact.abs().max().clamp(min=1e-30)
    return float(error.nan_to_num(nan=math.inf))
