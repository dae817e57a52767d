"""Tests a model's layers on the device: compares the results of the selected backends with the reference in float64.

For each kind of layer, a model with one such layer between an embedding and a loss runs forward and backward in the
precision of the run. The shapes of the inputs are chosen so that Triton compiles the same code as for the run. One
input has the length of the run's sequences, if it fits the memory. More inputs run forward without gradients, as in
validation. If ranks share sequences, the layers compute what the second of two ranks would compute.
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
from mamba_fsdp.parallel.context import ContextGroup
from mamba_fsdp.settings.train_config import TrainConfig
from mamba_fsdp.this_process import progress, rank_and_host

# The length of a test input. The length of the run's sequences modulo 16 is added to it, because Triton compiles different
# code for each remainder. SSD can divide this length in two. No kernel's chunk divides this length.
POSITIONS = 592
# The number of different made-up tokens. It is a prime, so that each position of a row has a different token and therefore
# its own gradient, and all rows differ.
TOKENS = 1009
VOCABULARY = 1024
# If rows times channels are at least this number, they occupy a whole GPU. If they are fewer, kernels split the rows.
GPU_FILLING_SIZE = 32768
# The largest error allowed for a result tensor, relative to the tensor's largest value. If MARGIN times the error of plain
# PyTorch in the precision of the run is larger, as in layers with few channels, the larger error is allowed. In layers of
# usual sizes, the error of plain PyTorch is half of these tolerances, and a wrong sign exceeds them by a factor of seven
# or more. In fp32, matrix products in TF32 exceed the tolerance.
TOLERANCES = {torch.float32: 1e-4, torch.float16: 0.01, torch.bfloat16: 0.05}
MARGIN = 4
# The upper limit of MARGIN times the error of plain PyTorch: on a faulty GPU, plain PyTorch is wrong too.
MAX_TOLERANCE = 0.5
TIMED_ROUNDS = 7

Results = dict[str, torch.Tensor]


class GpuLostError(TransientError):
    """The error of a GPU that this process can't use any more. A new process can use it."""


class Rows(NamedTuple):
    """The shape of a test input with made-up tokens."""

    batch: int
    positions: int
    before: int = 0  # number of positions that are read first, to compute the initial state

    def __str__(self) -> str:
        return f"over {self.batch} x {self.positions} positions after {self.before}"


# The shapes of the tests without gradients. Validation and generation read texts of any length. Triton compiles different
# code for short texts, and for lengths that are not a multiple of 4.
READS = [Rows(1, 1), Rows(1, 16), Rows(1, 17), Rows(1, 608), Rows(1, 609)]
READS_AFTER_STATE = [Rows(1, 1, before=1), Rows(1, 17, before=16), Rows(1, 609, before=608)]


class SecondOfTwo(ContextGroup):
    """Behaves like the second of two ranks that share sequences. The first rank has the same inputs, so no other
    process is needed."""

    def previous_inputs(self, x: torch.Tensor, count: int) -> torch.Tensor:
        return x[:, x.shape[1] - count :]

    def entering_state(self, last: torch.Tensor, decay: torch.Tensor) -> torch.Tensor:
        return last

    def gather_sequence(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x, x], dim=1)


class Comparison(NamedTuple):
    """The comparison of a layer's results with float64. It describes the tensor with the largest `share`."""

    share: float  # the error divided by the allowed error
    tensor: str
    error: float  # the error relative to the tensor's largest value
    allowed: float
    bits: str  # a hash of all result tensors


class LayerCheck:
    """Checks the layers of a run's model on a device.

    kinds: the kinds of layers in the model. shape: the shape of a micro-batch of the run. tests: the shapes to test
    with gradients. reads: the shapes to test without gradients. is_sharded: whether the operators get the weights in
    the precision of the run. Without sharding they get fp32 weights, and Triton compiles different code.
    """

    def __init__(
        self, settings: TrainConfig, device: torch.device, is_sharded: bool = False
    ) -> None:
        training = settings.training
        own = settings.positions_per_rank()
        self.model = settings.model
        self.device = device
        self.dtype = DTYPES[training.precision(device.type)]
        self.is_sharded = is_sharded
        self.deterministic = training.deterministic
        self.seq_idx = settings.data.reset_at_documents
        kinds = [layer.mixer + "+mlp" * layer.mlp for layer in self.model.layer_list()]
        self.kinds = list(dict.fromkeys(kinds))
        self.shape = Rows(training.batch_size, own)
        # If the rows of the run fill the GPU, so do the rows of the test. With fewer rows, kernels would split them, and
        # other code would be tested.
        batch = min(training.batch_size, 1 + GPU_FILLING_SIZE // self.model.d_inner)
        self.tests = [Rows(batch, POSITIONS + own % 16), Rows(1, own)]
        self.reads = READS
        self.context = None
        if settings.parallel.context_parallel > 1:
            self.context = SecondOfTwo(1, 2, None, device)
            self.reads = self.tests[:1]  # each rank's part of a text is as long as in training
        # {kind of layer: (reference results in float64, reference results in the precision of the run)}
        self.expected: dict[str, tuple[Results, Results]] = {}

    def make_model(
        self, kinds: list[str], backends: dict[str, str], exact: bool = False
    ) -> MambaLM:
        """Returns a model with one layer of each of these kinds.

        Its weights are random, and so large that every operator affects the gradients. backends: {operator: backend}.
        exact: whether to use float64
        instead of the precision of the run.
        """
        config = dataclasses.replace(
            self.model,
            layers=",".join(kinds),
            n_layer=len(kinds),
            # The remainder is kept, because the selected kernels depend on it.
            vocab_size=VOCABULARY + self.model.padded_vocab_size % 8,
            pad_vocab_size_multiple=1,
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
                value -= 3  # so that states decay over dozens of positions
            if self.is_sharded and name not in model.fp32_parameter_names():
                value = value.to(self.dtype)
            parameter.data = value.double() if exact else value
        model.enable_context_parallel(self.context)
        return model

    def run(self, model: MambaLM, rows: Rows) -> Results:
        """Runs the model on made-up tokens.

        Returns the output, the loss and, if gradients are enabled, each parameter's gradient.

        A row consists of three documents (over both ranks, if ranks share sequences), or of one document if it begins
        with a state.
        """
        progress.touch()
        length = rows.before + rows.positions
        tokens = torch.arange(rows.batch * length, device=self.device).view(rows.batch, length)
        tokens = tokens * 7 % TOKENS
        own = tokens[:, rows.before :]
        whole = 2 * length if self.context else length
        whole_rows = torch.zeros(rows.batch, whole, dtype=torch.int32, device=self.device)
        seq_idx = None
        documents = None
        states = None
        if rows.before:
            _, states = model(tokens[:, : rows.before], [])
        elif self.seq_idx:
            whole_rows += torch.arange(whole, device=self.device) * 3 // whole
            seq_idx = whole_rows
        if self.context:
            documents = Documents.asked_by_last(whole_rows, rows.positions)
        output = model.final_norm(*model.run_blocks(own, seq_idx, documents, states))
        loss = model.loss(output, own)
        results = {f"output {rows}": output.detach(), f"loss {rows}": loss.detach()}
        if torch.is_grad_enabled():
            loss.backward()
            for name, parameter in model.named_parameters():
                name = name.removeprefix("backbone.layers.0.")
                results[f"gradient of {name} {rows}"] = parameter.grad
                parameter.grad = None
        return results

    def results(self, kind: str, backends: dict[str, str], exact: bool = False) -> Results:
        """Returns the results of a layer of this kind for all test shapes."""
        model = self.make_model([kind], backends, exact)
        results: Results = {}
        for rows in self.tests:
            results |= self.run(model, rows)
        with torch.no_grad():
            for rows in self.reads:
                results |= self.run(model, rows)
        self.synchronize()
        return results

    def measure(self, kind: str, backends: dict[str, str]) -> Comparison:
        """Compares a layer of this kind, computed with these backends, with the reference in float64.

        If inputs of the run's own length do not fit the memory, this and later comparisons are made without them.
        """
        with contextlib.suppress(torch.cuda.OutOfMemoryError):
            return self.compare(kind, backends)
        del self.tests[1:]
        return self.compare(kind, backends)

    def compare(self, kind: str, backends: dict[str, str]) -> Comparison:
        """Compares as `measure` does, but raises torch.cuda.OutOfMemoryError if an input does not fit the memory."""
        if kind not in self.expected:
            exact = self.results(kind, REFERENCE, True)
            self.expected[kind] = (exact, self.results(kind, REFERENCE))
        exact, plain = self.expected[kind]
        bits = hashlib.sha256()
        measured = []
        for name, tensor in self.results(kind, backends).items():
            bits.update(tensor.reshape(-1).view(torch.uint8).cpu().numpy())
            error = relative_error(tensor, exact[name])
            plain_error = relative_error(plain[name], exact[name])
            allowed = max(TOLERANCES[self.dtype], min(MARGIN * plain_error, MAX_TOLERANCE))
            measured.append((error / allowed, name, error, allowed))
        return Comparison(*max(measured), bits.hexdigest())

    def check(self, backends: dict[str, str]) -> tuple[str, str]:
        """Tests all kinds of layers with these backends. Returns (problem, hash of the results); one of them is "".

        Raises TransientError for an error that is not caused by the backends.
        """
        bits = ""
        for kind in self.kinds:
            try:
                measured = self.measure(kind, backends)
                repeats = not self.deterministic or self.measure(kind, backends) == measured
            # Compilers, drivers and libraries raise all kinds of exceptions.
            except Exception as error:
                return self.describe_error(error), ""
            if measured.share > 1:
                off = f"off by {measured.error:.1g} of its largest value"
                return f"{measured.tensor} is {off}; {measured.allowed:.1g} is allowed", ""
            if not repeats:
                return "the results do not repeat bit for bit", ""
            bits += measured.bits
        return "", bits

    def describe_error(self, error: Exception) -> str:
        """Returns the error as one line. Raises TransientError if the error is not caused by the backends."""
        message = f"{type(error).__name__}: {first_line(error)}"
        try:
            self.synchronize()
        except RuntimeError:
            raise GpuLostError(
                f"{rank_and_host()}: {message}, and the GPU is lost: start again; if a model with Mamba-2 or Mamba-3 "
                "loses it again, try kernels=ssd=triton-simpler"
            ) from error
        full = out_of_memory_message(error, rank_and_host())
        if full:
            raise TransientError(full) from error
        if isinstance(error, OSError):
            raise TransientError(
                f"{rank_and_host()}: the test of the kernels could not run: {message}; the kernels are not the cause: start "
                "again, and correct this error if it persists"
            ) from error
        return message

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def milliseconds(self, backends: dict[str, str]) -> float:
        """Returns the time of forward and backward through one layer of each kind with the shape of the run.

        The host launches kernels without waiting for the device, as in training, so the slower of the two determines
        the time. Returns infinity if the layers fail or do not fit the memory.
        """
        try:
            model = self.make_model(self.kinds, backends)
            self.run(model, self.shape)  # compiles the kernels
            self.synchronize()
            began = time.perf_counter()
            for _ in range(TIMED_ROUNDS):
                self.run(model, self.shape)
            self.synchronize()
            return 1e3 * (time.perf_counter() - began) / TIMED_ROUNDS
        except torch.cuda.OutOfMemoryError:
            return math.inf
        except Exception as error:
            self.describe_error(error)  # raises TransientError
            return math.inf


def relative_error(found: torch.Tensor, exact: torch.Tensor) -> float:
    """Returns the largest difference divided by the largest exact value; infinity if there are NaNs."""
    error = (found - exact).abs().max() / exact.abs().max().clamp(min=1e-30)
    return float(error.nan_to_num(nan=math.inf))
