"""Defines every setting of a training run. Each field has a type, a default and bounds; the string below it is its help
text.

The names of settings are unique over all sections. Therefore `--learning_rate=3e-4`, `--optimizer.learning_rate=3e-4` and
the YAML forms `learning_rate: 3e-4` and `optimizer: {learning_rate: 3e-4}` all mean the same setting.
mamba_fsdp/settings/resolve.py resolves them.
"""

import contextlib
import dataclasses
import math
import os
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from fractions import Fraction
from functools import lru_cache
from typing import Any

from mamba_fsdp.errors import UserError
from mamba_fsdp.fields import Condition, Duration, condition, format_value, has_effect, setting
from mamba_fsdp.model import spec
from mamba_fsdp.model.config import ModelConfig, round_up
from mamba_fsdp.ops.backends import Use, demands
from mamba_fsdp.storage.retry import exists, read_text

# The time of a validation as a fraction of the training time between two validations, unless eval_batches is set.
VALIDATION_SHARE = 0.05
WEIGHTS_FILES = (".pth", ".pt", ".bin", ".safetensors")
SCHEDULES = (
    "cosine",
    "linear",
    "wsd",
    "wsd_cosine",
    "wsd_sqrt",
    "polynomial",
    "cosine_with_restarts",
    "inverse_sqrt",
    "constant",
    "annealing",
    "fms_cosine",
)


def steps(default: int, **more: Any) -> Any:
    return setting(Duration(default, "steps"), **more)


# ---------------------------------------------------------------- the conditions under which settings have an effect


def requires_value(name: str, *values: Any) -> Condition:
    """Returns the condition that the setting `name` has one of `values`."""

    def met(settings: "TrainConfig") -> bool:
        return settings.value(name) in values

    return Condition(f"{name}={' or '.join(map(format_value, values))}", met)


with_position_weighting = requires_value("position_weighting", True)
with_polynomial = requires_value("schedule", "polynomial")
with_restarts = requires_value("schedule", "cosine_with_restarts")
with_final_decay = requires_value("schedule", "wsd", "wsd_cosine", "wsd_sqrt")
with_recomputing = requires_value("fsdp_activation_checkpointing", True)
with_sharding = requires_value("sharding_strategy", "fsdp", "hsdp", "auto")
with_muon = requires_value("optimizer", "muon")
# {muon_coefficients: number of iterations}, as in trainer/muon.py
NEWTON_SCHULZ_ITERATIONS = {"jordan": 5, "minimax": 3}
ENDING_SCHEDULES = [name for name in SCHEDULES if name not in ("constant", "inverse_sqrt")]
with_schedule_end = requires_value("schedule", *ENDING_SCHEDULES)


@condition("eval_interval above 0")
def validation_path_has_effect(settings: "TrainConfig") -> bool:
    return settings.data.validation_path == "none" or settings.training.eval_interval.count > 0


@condition("a validation_path")
def eval_interval_has_effect(settings: "TrainConfig") -> bool:
    return settings.data.validation_path != "none" or settings.training.eval_interval.count == 0


@condition("eval_interval above 0 and a validation_path")
def validates(settings: "TrainConfig") -> bool:
    return settings.data.validation_path != "none" and settings.training.eval_interval.count > 0


@condition("num_workers above 0")
def has_workers(settings: "TrainConfig") -> bool:
    return settings.data.num_workers > 0


@condition(
    "a schedule that decays to a floor: not constant, annealing, inverse_sqrt, or wsd with decay_steps=0"
)
def decays_to_floor(settings: "TrainConfig") -> bool:
    has_floor = settings.lr_schedule.schedule not in ("constant", "annealing", "inverse_sqrt")
    return has_floor and settings.lr_schedule.decay_steps.count != 0


@condition("tracker=wandb")
def uses_wandb(settings: "TrainConfig") -> bool:
    return "wandb" in settings.report.tracker


@dataclass(frozen=True)
class DataConfig:
    """The training data, and the order in which it is read."""

    dataset_path: str = setting("data/builtin", is_path=True)
    """Training data: a token store made by get_dataset.py, a folder with the stores train/ and validation/, or a folder
    with several stores to mix (see datasets). data/builtin is created if it does not exist."""
    datasets: list[str] = setting([])
    """Names of the stores in dataset_path to mix, for example code,text. Empty: the store train in dataset_path, or
    dataset_path itself."""
    weights: list[float] = setting([])
    """Sampling weight of each dataset; only their ratios matter. Empty: in proportion to their numbers of tokens."""
    validation_path: str = setting("auto", needs=validation_path_has_effect, is_path=True)
    """The token store to validate on. auto: the store named validation next to the training data. none: do not
    validate."""
    allow_other_tokenizer: bool = setting(False)
    """Accept different tokenizers for the datasets, the validation data and the model to start from."""
    use_dummy_dataset: bool = setting(False)
    """Train on synthetic tokens, for benchmarks: an endless sequence that counts up through the vocabulary."""
    seq_length: int = setting(256, at_least=1)
    """Sequence length (context length): the number of tokens per sample. The default comes from the recipe of
    model_name (mamba_fsdp/settings/recipes.yaml)."""
    reset_at_documents: bool = setting(False)
    """Reset the state, the convolution and attention at the start of each document inside a sample, so that no document
    influences another."""
    position_weighting: bool = setting(False)
    """Weight each token's loss with tanh(p / position_window), where p is the number of tokens of its document before it
    in the sample. The loss is the weighted mean over the global batch."""
    position_window: float = setting(10.0, above=0, needs=with_position_weighting)
    """The number of tokens after which the weight of position_weighting reaches three quarters of its maximum."""
    num_workers: int = setting(1, at_least=0, at_most=64)
    """Number of threads per rank that read batches ahead. 0: read each batch when it is needed."""
    prefetch: int = setting(2, at_least=1, at_most=1024, needs=has_workers)
    """Number of steps to read ahead."""

    def absolute_paths(self) -> set[str]:
        """Returns the absolute paths of the training data. Synthetic data has a name instead of a path."""
        if self.use_dummy_dataset:
            return {"made-up tokens"}
        return {
            os.path.realpath(os.path.join(self.dataset_path, name))
            for name in self.datasets or [""]
        }

    def check(self) -> None:
        """Checks the weights. Raises UserError unless there is one for each dataset, none is negative, and their sum is
        positive and finite."""
        if not self.weights:
            return
        if len(self.weights) != len(self.datasets):
            raise UserError(
                f"weights has {len(self.weights)} values, but datasets has {len(self.datasets)} names; "
                "give one weight for each dataset"
            )
        if min(self.weights) < 0 or not 0 < sum(self.weights) < math.inf:
            raise UserError(
                f"weights {self.weights}: no weight can be negative, and their sum must be positive and finite"
            )


@dataclass(frozen=True)
class OptimizerConfig:
    """The optimizer and its hyperparameters."""

    recipe: str = setting("tuned", choices=("tuned", "published"))
    """Source of the defaults of the optimizer and of the schedule. tuned: the best values that this project has measured on
    small models, with a learning_rate for this width and batch (docs/tuning.md); the default without a preset.
    published: as the model of model_name was trained (mamba_fsdp/settings/recipes.yaml); the default for presets and for
    starts from trained weights. A run that resumes keeps its recipe."""
    optimizer: str = setting("adamw", choices=("adamw", "muon"))
    """The optimizer: AdamW or Muon. Muon updates the matrices of mixers and MLPs with their orthogonalized momentum, and
    all other parameters with AdamW. Its updates are scaled to the size of AdamW's updates, so that the same learning_rate
    and weight_decay suit both."""
    muon_momentum: float = setting(0.95, at_least=0, at_most=0.9999999, needs=with_muon)
    """Muon: decay rate of the running average of the gradient."""
    muon_coefficients: str = setting(
        "jordan", choices=tuple(NEWTON_SCHULZ_ITERATIONS), needs=with_muon
    )
    """Muon: coefficients of the Newton-Schulz iterations. jordan: 5 iterations (Jordan et al. 2024). minimax: 3 iterations,
    which are as good and take less time (docs/tuning.md)."""
    learning_rate: float = setting(3e-3, above=0)
    """Peak learning rate. The default comes from the recipe; the published one is 0.0003 if the model has no recipe or
    the run starts from trained weights."""
    weight_decay: float = setting(0.1, at_least=0)
    """Decoupled weight decay (AdamW). It applies to projection matrices, convolution kernels, the embedding and the output
    layer. It does not apply to norms, biases, A_log, D or dt_bias."""
    beta1: float = setting(0.9, at_least=0, at_most=0.9999999)
    """Decay rate of AdamW's running average of the gradient."""
    beta2: float = setting(0.95, at_least=0, at_most=0.9999999)
    """Decay rate of AdamW's running average of the squared gradient."""
    adam_epsilon: float = setting(1e-8, above=0)
    """Added to the denominator of AdamW's update for numerical stability."""
    grad_clip_thresh: float = setting(1.0, at_least=0)
    """Maximal global norm of the gradients; larger gradients are scaled down to it. 0: do not clip."""


@dataclass(frozen=True)
class ScheduleConfig:
    """The learning rate over the run. Durations are in steps, or in tokens if written like 2Btok."""

    schedule: str = setting("cosine", choices=SCHEDULES)
    """Shape of the learning rate after a linear warm-up. cosine, linear, polynomial and cosine_with_restarts decay to the
    floor. wsd, wsd_cosine and wsd_sqrt stay constant, then decay over decay_steps: linearly, like a cosine, or like a
    square root. inverse_sqrt decays without end, and annealing decays linearly to 0. fms_cosine, the schedule of
    fms-fsdp, has a quadratic warm-up and follows a cosine that begins at step 0."""
    polynomial_power: float = setting(1.0, above=0, needs=with_polynomial)
    """Exponent of the polynomial schedule."""
    restart_cycles: int = setting(1, at_least=1, needs=with_restarts)
    """Number of times that cosine_with_restarts decays from learning_rate to the floor."""
    warmup_steps: Duration = steps(-1, at_least=-1)
    """Length of the warm-up. -1: a twentieth of the run, but at most 2000 steps; annealing and constant have no
    warm-up."""
    warmup_ratio: float = setting(0.0, at_least=0, at_most=1, instead_of="warmup_steps")
    """Length of the warm-up as a fraction of the schedule. 0: use warmup_steps."""
    decay_steps: Duration = steps(-1, at_least=-1, needs=with_final_decay)
    """Length of the final decay of the wsd schedules. -1: a tenth of the run."""
    schedule_steps: Duration = steps(-1, at_least=-1, needs=with_schedule_end)
    """Length of the schedule. -1: the length of the run. In a longer run, the learning rate stays at the value at the end
    of the schedule. If num_steps is raised when a run resumes, the schedule keeps its length, unless the new length does
    not change the current learning rate."""
    min_learning_rate_ratio: float = setting(0.1, at_least=0, at_most=1, needs=decays_to_floor)
    """Floor of the schedules that decay to a floor, as a fraction of learning_rate."""


@dataclass(frozen=True)
class TrainingConfig:
    """The training loop: length, batch size, precision, validation."""

    num_epochs: float = setting(0.0, at_least=0, at_most=1_000_000, instead_of="num_steps")
    """Length of the run in epochs. An epoch has as many samples as the training data has windows of seq_length tokens. 0:
    use num_steps."""
    num_steps: Duration = steps(1000, at_least=1)
    """Length of the run in steps, or in tokens if written like 20Mtok. With a length in tokens, the learning rate is a
    function of the tokens seen, so that a later change of the global batch size does not change the schedule."""
    dry_run: bool = setting(False)
    """Print the model, its size, the memory that the run needs and the checkpoint that it would resume from, then exit.
    Nothing is written."""
    batch_size: int = setting(8, at_least=1)
    """Number of samples per device in one forward pass (the micro-batch)."""
    global_batch_size: int = setting(0, at_least=0)
    """Number of samples per step over all devices, reached by gradient accumulation. 0: batch_size times the number of
    devices."""
    gradient_accumulation_steps: int = setting(1, at_least=1, instead_of="global_batch_size")
    """Number of forward passes per step on each device. Prefer global_batch_size: a step then has the same samples on any
    number of devices."""
    seed: int = setting(2023, at_least=0, at_most=2**63 - 1)
    """Seed of the initial weights and of the order of the samples."""
    mixed_precision: str = setting("auto", choices=("auto", "bf16", "fp16", "fp32"))
    """Dtype of the matrix products: bf16, fp16 or fp32. auto: bf16 on a GPU, fp32 on a CPU. Weights, their updates, the
    recurrence and reductions are always in fp32. true means bf16, false means fp32."""
    kernels: str = setting("auto")
    """Backends of the operators. auto: measure all backends on this GPU at the start of the run, and use the fastest that
    gives correct results. fused (CUDA libraries), triton, flash (attention), cpp (C on a CPU) or reference (plain
    PyTorch): use this backend for every operator that has it. scan=reference,conv=cpp: use these backends for these
    operators only. It is an error if a requested backend does not work or gives wrong results."""
    deterministic: bool = setting(False)
    """Use only deterministic operations, so that two runs with equal settings are bitwise identical. On a GPU, each
    backend is tested for this at the start of the run, and the backends of the CUDA libraries are not used."""
    max_skipped_steps: int = setting(10, at_least=1)
    """Stop after this many consecutive steps with a loss or gradient that is not finite. Such steps do not change the
    weights."""
    eval_interval: Duration = steps(200, at_least=0, needs=eval_interval_has_effect)
    """Validation interval. A run also validates at its start and at its end. 0: never validate."""
    eval_batches: int = setting(-1, at_least=-1, needs=validates)
    """Number of global batches per validation, spread evenly over each store. 0: all data. -1: as many as fit into a
    twentieth of the training time between two validations."""
    eval_prompts: str = setting("", needs=validates)
    """A prompt that the model continues by 50 tokens at each validation, with greedy decoding. Several prompts are written
    one per line; the path of a text file with one prompt per line also works. The results appear in the log, the metrics,
    the trackers and the report."""

    def read_prompts(self) -> str:
        """Returns the prompts, read from the file if eval_prompts is a path, so that the ranks do not need the file. Raises
        UserError if the file can't be read or is a folder, and for text that is blank or not UTF-8."""
        given = self.eval_prompts
        prompts = given
        try:
            given.encode()
            # A longer text can't be the name of a file.
            if given.endswith(".txt") or len(given) < 256 and exists(given):
                prompts = read_text(given) + "\n"
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", error)
            raise UserError(
                f"eval_prompts={given}: can't be read ({reason}); give text in UTF-8, or the path of a readable .txt file"
            ) from None
        if given and not prompts.strip():
            raise UserError(f"eval_prompts={given} contains no prompt; write one prompt per line")
        return prompts

    def check(self) -> None:
        """Raises UserError if global_batch_size is not a multiple of batch_size, and for unknown names in `kernels`."""
        if self.global_batch_size % self.batch_size:
            raise UserError(
                f"global_batch_size={self.global_batch_size} is not a multiple of batch_size={self.batch_size}; set "
                f"global_batch_size={round_up(self.global_batch_size, self.batch_size)}, or another batch_size"
            )
        demands(self.kernels)

    def precision(self, device_type: str) -> str:
        """Returns the precision of the matrix products on a device of type "cpu" or "cuda": bf16, fp16 or fp32."""
        if self.mixed_precision != "auto":
            return self.mixed_precision
        return "fp32" if device_type == "cpu" else "bf16"


@dataclass(frozen=True)
class CheckpointConfig:
    """The run folder, its checkpoints, and the weights that the run starts from."""

    save_ckpt_path: str = setting("runs/train", is_path=True)
    """The run folder. If it contains a committed checkpoint, the run resumes from it, and load_ckpt_path and init_from
    have no effect."""
    load_ckpt_path: str = setting("", is_path=True)
    """Checkpoint or weights that a new run starts from. From a file (.pth, .pt, .bin, .safetensors) it loads the weights.
    From a run or checkpoint folder it loads the weights and the optimizer state, and with resuming_dataset the position in
    the data. The model takes the shape of the weights, as with init_from. The path can be the same as save_ckpt_path."""
    resuming_dataset: bool = setting(False)
    """Also load the position in the data from load_ckpt_path."""
    init_from: str = setting("", is_path=True)
    """Weights that a new run starts from: a transformers or state-spaces folder, a run, a checkpoint or a .pth file. The
    model takes the shape of the weights. Model settings that are given must agree with it; they must describe the model
    if there is no config.json."""
    checkpoint_interval: Duration = steps(500, at_least=1)
    """Checkpoint interval. A run also saves at its end and when it is stopped."""
    keep_checkpoints: int = setting(3, at_least=1)
    """Number of newest checkpoints to keep. Older checkpoints are removed once no other process reads them."""
    keep_every: Duration = steps(0, at_least=0)
    """Keep the first checkpoint at or after each multiple of this many steps forever, for example to evaluate it later, to
    average checkpoints (mamba-fsdp average) or to replay steps (mamba-fsdp replay). 0: keep only the newest ones."""
    max_failed_saves: int = setting(5, at_least=1)
    """Stop after this many failed saves in a row. Until then, the run keeps training and retries the save after one minute,
    two minutes, four minutes and so on."""
    async_checkpoint: bool = setting(True)
    """Write checkpoints while training continues."""
    publish: bool = setting(True)
    """At the end, write the model into pth/ as one file. It can also be written later, with python -m mamba_fsdp export RUN
    FOLDER --format=pth."""

    def loads_weights_file(self) -> bool:
        """Returns whether load_ckpt_path is a file. Files contain only weights."""
        return self.load_ckpt_path.endswith(WEIGHTS_FILES)

    def loads_own_folder(self) -> bool:
        """Returns whether load_ckpt_path is the run folder itself. The run then resumes, or starts from scratch if the
        folder is empty."""
        return os.path.realpath(self.load_ckpt_path) == os.path.realpath(self.save_ckpt_path)

    def starts_from_model(self) -> bool:
        """Returns whether a new run starts from the weights of another run or model, and takes their shape."""
        return bool(self.init_from or self.load_ckpt_path and not self.loads_own_folder())

    def check(self) -> None:
        """Raises UserError if the settings give two starting points, or resuming_dataset without a checkpoint."""
        if self.load_ckpt_path and self.init_from:
            raise UserError(
                "load_ckpt_path and init_from exclude each other: a run has one starting point; give one of them"
            )
        if self.resuming_dataset and (not self.load_ckpt_path or self.loads_weights_file()):
            raise UserError(
                "resuming_dataset needs load_ckpt_path to be a run or checkpoint folder, "
                "because files of weights do not contain the position in the data"
            )


@dataclass(frozen=True)
class ParallelConfig:
    """How the model and its training are distributed over the devices."""

    sharding_strategy: str = setting("auto", choices=("auto", "fsdp", "hsdp", "ddp", "none"))
    """How parameters are distributed. fsdp shards them over all devices; hsdp shards them within a node and replicates
    them across nodes; ddp replicates them. auto: fsdp, or none on one device."""
    fsdp_activation_checkpointing: bool = setting(False)
    """Recompute activations in the backward pass instead of storing them: this takes less memory and more time."""
    selective_checkpointing: str = setting("1", needs=with_recomputing)
    """Fraction of the blocks that recompute their activations, for example 1/3 or 0.33. 0: none."""
    accumulate_unsharded: bool = setting(False, needs=with_sharding)
    """Accumulate the gradients of a step on each device, and reduce them only once per step. Gradient accumulation then
    needs less communication, but each device stores the gradients of the whole model in fp32."""
    context_parallel: int = setting(1, at_least=1)
    """Number of neighbouring devices that share each sequence, for sequences too long for one device. Each of N devices
    computes 1/N of the positions."""
    use_torch_compile: bool = setting(False)
    """Compile each block with torch.compile and, on a GPU, also the loss."""
    timeout_minutes: float = setting(10.0, above=0, at_most=100_000)
    """A rank that makes no progress for this many minutes prints its stack traces and ends the job. Raise it if compiling
    or reading data takes longer."""

    def selective_share(self) -> Fraction:
        """Parses selective_checkpointing. Returns a fraction in [0, 1]. Raises UserError for any other text."""
        text = self.selective_checkpointing
        share = Fraction(-1)
        # The exponent has one digit, because Fraction would compute a huge power of ten for hours.
        if re.fullmatch(r"[\d./]{1,20}(e-\d)?", text):
            with contextlib.suppress(ValueError, ZeroDivisionError):
                share = Fraction(text)
        if not 0 <= share <= 1:
            raise UserError(
                f"selective_checkpointing={text!r} must be a fraction, at least 0 and at most 1, "
                "as in 1/3 or 0.33"
            )
        return share


@dataclass(frozen=True)
class ReportConfig:
    """Metrics, trackers and profiles."""

    report_interval: Duration = steps(20, at_least=1)
    """Number of steps, or tokens, between entries in metrics.jsonl and in the log."""
    tracker: list[str] = setting([], choices=("tensorboard", "wandb"))
    """Also send the metrics to these trackers, for example tensorboard,wandb. TensorBoard's files are written to the run
    folder. none: no tracker."""
    wandb_project: str = setting("", needs=uses_wandb)
    """Project in W&B. Empty: the environment variable WANDB_PROJECT, or mamba-fsdp if it is not set."""
    wandb_name: str = setting("", needs=uses_wandb)
    """Name of the run in W&B. Empty: the environment variable WANDB_NAME, or the run folder's name if it is not set."""
    use_profiler: bool = setting(False)
    """Record a torch profile of steps 5 to 7 after each start to profile/rank_R.json in the run folder, and print a
    summary."""


def command_start_time() -> float:
    """Returns when the user's command was started, in seconds since the epoch. 1.train.sbatch passes it in COMMAND_BEGAN;
    without it, the result is the current time."""
    return float(os.environ.get("COMMAND_BEGAN") or time.time())


@dataclass(frozen=True)
class TrainConfig:
    """All settings of a run. They are immutable; `with_values` returns a modified copy."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    lr_schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    report: ReportConfig = field(default_factory=ReportConfig)
    # The names of the settings that the user gave.
    explicit: frozenset[str] = field(default=frozenset(), compare=False)
    # Lines for the run's log: settings of other launchers that were translated, values that were adjusted, and settings
    # without effect.
    notes: tuple[str, ...] = field(default=(), compare=False)
    # Whether the user chose the run folder for this run. If not, the folder can contain a run with another model or other data,
    # and therefore the start checks this.
    has_own_folder: bool = field(default=False, compare=False)
    # The time when the user's command was started, in seconds since the epoch.
    began: float = field(default_factory=command_start_time, compare=False)

    def value(self, name: str) -> Any:
        """Returns the value of the setting `name`, in whichever section it is."""
        section, _ = all_settings()[name]
        return getattr(getattr(self, section), name)

    def with_values(self, **values: Any) -> "TrainConfig":
        """Returns a copy with other values for some settings, given as name=value without their sections."""
        by_section: dict[str, dict[str, Any]] = {}
        for name, value in values.items():
            section, _ = all_settings()[name]
            by_section.setdefault(section, {})[name] = value
        sections = {
            section: dataclasses.replace(getattr(self, section), **changes)
            for section, changes in by_section.items()
        }
        return dataclasses.replace(self, **sections)

    def has_effect(self, name: str) -> bool:
        """Returns whether the setting `name` has an effect, given the values of the other settings."""
        section, option = all_settings()[name]
        return has_effect(option, self.model if section == "model" else self)

    def adjusted(self) -> "TrainConfig":
        """Returns a copy in which settings that the user did not give are adjusted to the settings that the user gave, for
        example the number of heads to d_model. The copy's `notes` list the adjustments."""
        settings = self
        for name, value_that_fits in ADJUSTMENTS.items():
            usual = settings.value(name)
            value = value_that_fits(settings)
            if name not in self.explicit and value != usual and settings.has_effect(name):
                note = f"{name}={value} instead of {usual}, to fit the other settings"
                settings = settings.with_values(**{name: value})
                settings = dataclasses.replace(settings, notes=(*settings.notes, note))
        return settings

    def check(self) -> None:
        """Checks combinations of settings, before a process group is created or a GPU is used. Raises UserError for
        combinations that do not work."""
        if not self.checkpoint.starts_from_model():
            self.check_model()
        self.data.check()
        self.training.check()
        self.checkpoint.check()
        self.parallel.selective_share()
        if self.parallel.context_parallel > 1 and self.training.eval_prompts:
            raise UserError(
                f"eval_prompts: text can't be generated with context_parallel={self.parallel.context_parallel}; "
                "leave one of the two out"
            )

    def check_model(self) -> None:
        """Raises UserError if the model is invalid or can't be trained with these settings.

        With init_from, call this function only after the configuration of the weights has been read, because that
        configuration determines the model."""
        self.model.check()
        if self.parallel.context_parallel > 1 and self.model.has_mixer("gdn"):
            raise UserError(
                f"context_parallel={self.parallel.context_parallel}: Gated DeltaNet (layers gdn) can't share sequences "
                "between ranks; leave it at 1"
            )

    def operator_uses(self, device_type: str) -> dict[str, list[Use]]:
        """Returns the uses of each operator in the training on this type of device."""
        # This import loads torch. At the top of the file, it would slow down command lines that need only the settings.
        from mamba_fsdp.conventions import DTYPES

        return spec.operator_uses(
            self.model,
            DTYPES[self.training.precision(device_type)],
            self.data.reset_at_documents,
            self.training.deterministic,
            self.parallel.context_parallel > 1,
            tokens=self.training.batch_size * self.positions_per_rank(),
        )

    def positions_per_rank(self) -> int:
        """Returns the number of positions of each sequence that one rank computes."""
        ranks = self.parallel.context_parallel
        if ranks == 1:
            return self.data.seq_length
        # The convolution of the next rank reads this many positions.
        min_positions = self.model.d_conv - 1
        return max(-(-self.data.seq_length // ranks), min_positions)


# ---------------------------------------------------------------- the adjustments that `adjusted` makes, in this order


def adjusted_headdim(settings: TrainConfig) -> int:
    model = settings.model
    per_group = model.d_inner // math.gcd(model.d_inner, model.ngroups)
    return math.gcd(model.headdim, per_group)


def adjusted_n_head(settings: TrainConfig) -> int:
    model = settings.model
    return model.n_head if model.head_dim else math.gcd(model.n_head, model.d_model)


def adjusted_n_kv_head(settings: TrainConfig) -> int:
    model = settings.model
    return model.n_head if model.n_head % model.n_kv_head else model.n_kv_head


def adjusted_rotary_dim(settings: TrainConfig) -> int:
    model = settings.model
    return -1 if model.rotary_dim > model.resolved_head_dim else model.rotary_dim


def adjusted_batch_size(settings: TrainConfig) -> int:
    return math.gcd(settings.training.batch_size, settings.training.global_batch_size)


def adjusted_global_batch_size(settings: TrainConfig) -> int:
    return round_up(settings.training.global_batch_size, settings.training.batch_size)


ADJUSTMENTS: dict[str, Callable[[TrainConfig], Any]] = {
    "headdim": adjusted_headdim,
    "ngroups": lambda settings: math.gcd(settings.model.ngroups, settings.model.n_ssm_head),
    "n_head": adjusted_n_head,
    "n_kv_head": adjusted_n_kv_head,
    "rotary_dim": adjusted_rotary_dim,
    "multipliers": lambda settings: settings.model.applicable_multipliers(),
    "batch_size": adjusted_batch_size,
    "global_batch_size": adjusted_global_batch_size,
}

SECTIONS: dict[str, Any] = {
    section.name: section.default_factory
    for section in dataclasses.fields(TrainConfig)
    if dataclasses.is_dataclass(section.default_factory)
}


@lru_cache(maxsize=None)
def all_settings() -> dict[str, tuple[str, dataclasses.Field]]:
    """Returns {field name: (section name, dataclass field)}."""
    settings: dict[str, tuple[str, dataclasses.Field]] = {}
    for section, kind in SECTIONS.items():
        for option in dataclasses.fields(kind):
            assert option.name not in settings, f"two settings are called {option.name}"
            settings[option.name] = (section, option)
    return settings


@lru_cache(maxsize=None)
def setting_names() -> dict[str, str]:
    """Returns {accepted name of a setting: its name}. A setting is accepted with its section, as in optimizer.learning_rate, and
    without it."""
    with_sections = {f"{section}.{name}": name for name, (section, _) in all_settings().items()}
    return with_sections | {name: name for name in all_settings()}
