"""Describes every setting of a training run: name, type, default, bounds and meaning (the string below
each field).

Leaf names are unique over the sections, so `--learning_rate=3e-4`, `--optimizer.learning_rate=3e-4`
and the YAML forms `learning_rate: 3e-4` and `optimizer: {learning_rate: 3e-4}` give the same
setting. mamba_fsdp/settings/resolve.py resolves them.
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
from mamba_fsdp.fields import Duration, Needs, condition, has_effect, setting, shown
from mamba_fsdp.model import spec
from mamba_fsdp.model.config import ModelConfig, round_up
from mamba_fsdp.ops.backends import Use, demands
from mamba_fsdp.storage.patience import exists, read_text

# The time of one validation, as a share of the training between two, unless eval_batches is set.
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


# The conditions under which settings have an effect.


def value_of(name: str, *values: Any) -> Needs:
    """Returns the condition that the setting `name` has one of these values."""

    def met(settings: "TrainConfig") -> bool:
        return settings.value(name) in values

    return Needs(f"{name}={' or '.join(map(shown, values))}", met)


weighting = value_of("position_weighting", True)
polynomial = value_of("schedule", "polynomial")
restarts = value_of("schedule", "cosine_with_restarts")
final_decay = value_of("schedule", "wsd", "wsd_cosine", "wsd_sqrt")
recomputing = value_of("fsdp_activation_checkpointing", True)
sharding = value_of("sharding_strategy", "fsdp", "hsdp", "auto")
ending = [name for name in SCHEDULES if name not in ("constant", "inverse_sqrt")]
end_of_schedule = value_of("schedule", *ending)


@condition("eval_interval above 0")
def interval_or_no_store(settings: "TrainConfig") -> bool:
    return settings.data.validation_path == "none" or settings.training.eval_interval.count > 0


@condition("a validation_path")
def store_or_no_interval(settings: "TrainConfig") -> bool:
    return settings.data.validation_path != "none" or settings.training.eval_interval.count == 0


@condition("eval_interval above 0 and a validation_path")
def validation(settings: "TrainConfig") -> bool:
    return settings.data.validation_path != "none" and settings.training.eval_interval.count > 0


@condition("num_workers above 0")
def workers(settings: "TrainConfig") -> bool:
    return settings.data.num_workers > 0


@condition(
    "a schedule that decays to a floor: not constant, annealing, inverse_sqrt, or wsd with decay_steps=0"
)
def floor(settings: "TrainConfig") -> bool:
    falls_to_it = settings.lr_schedule.schedule not in ("constant", "annealing", "inverse_sqrt")
    return falls_to_it and settings.lr_schedule.decay_steps.count != 0


@condition("tracker=wandb")
def wandb(settings: "TrainConfig") -> bool:
    return "wandb" in settings.report.tracker


@dataclass(frozen=True)
class DataConfig:
    """The data, and the order in which it is read."""

    dataset_path: str = setting("data/builtin", is_path=True)
    """A token store made by get_dataset.py, or a folder with stores train/ and validation/, or a folder
    with several stores to mix (see datasets). data/builtin is made if it is missing."""
    datasets: list[str] = setting([])
    """Names of the stores in dataset_path to mix, as in code,text. Empty: its train store, or
    dataset_path itself."""
    weights: list[float] = setting([])
    """Share of each dataset in the samples, on any scale. Empty: in proportion to their tokens."""
    validation_path: str = setting("auto", needs=interval_or_no_store, is_path=True)
    """The token store to validate on. auto: the one named validation next to the training data.
    none: no validation."""
    allow_other_tokenizer: bool = setting(False)
    """Accept different tokenizers for the datasets, the validation data and the model to start from."""
    use_dummy_dataset: bool = setting(False)
    """Train on made-up tokens, for benchmarks: they count up through the vocabulary without end."""
    seq_length: int = setting(256, at_least=1)
    """Sequence length (context length): tokens per sample. Its default comes with model_name, from the
    model's recipe (mamba_fsdp/settings/recipes.yaml)."""
    reset_at_documents: bool = setting(False)
    """Keep state, convolution and attention within a document: none crosses the start of a document
    inside a sample."""
    position_weighting: bool = setting(False)
    """Weight each token's loss with tanh(p / position_window), where p is the number of tokens of
    its document before it in the sample. The loss is the weighted mean over the global batch."""
    position_window: float = setting(10.0, above=0, needs=weighting)
    """The number of tokens after which position_weighting gives three quarters of the full weight."""
    num_workers: int = setting(1, at_least=0, at_most=64)
    """Threads per rank that read batches ahead. 0: read each batch when it is needed."""
    prefetch: int = setting(2, at_least=1, at_most=1024, needs=workers)
    """Steps to read ahead."""

    def places(self) -> set[str]:
        """Returns the absolute paths of the data."""
        if self.use_dummy_dataset:
            return {"made-up tokens"}
        return {
            os.path.realpath(os.path.join(self.dataset_path, name))
            for name in self.datasets or [""]
        }

    def check(self) -> None:
        """Raises UserError for weights that can't be shares of the datasets."""
        if not self.weights:
            return
        if len(self.weights) != len(self.datasets):
            raise UserError(
                f"weights has {len(self.weights)} values but datasets {len(self.datasets)} names; "
                "name each dataset of the mixture, and give one weight each"
            )
        if min(self.weights) < 0 or not 0 < sum(self.weights) < math.inf:
            raise UserError(
                f"weights {self.weights} must not be negative, nor all zero, nor huge in sum"
            )


@dataclass(frozen=True)
class OptimizerConfig:
    """How the weights are updated. Weight decay applies to matrices only, not to norms, biases, A_log, D or dt_bias."""

    optimizer: str = setting("adamw", choices=("adamw", "muon"))
    """muon updates the matrices of mixers and MLPs by their orthogonalised momentum, and all other parameters as adamw
    does. Its steps are as large as AdamW's, so that learning_rate and weight_decay serve both."""
    learning_rate: float = setting(3e-3, above=0)
    """Peak learning rate. Its default comes with model_name; it is 0.0003 if the model has no recipe or
    the run starts from weights."""
    weight_decay: float = setting(0.1, at_least=0)
    """Decoupled weight decay."""
    beta1: float = setting(0.9, at_least=0, at_most=0.9999999)
    """Decay of the mean of the gradients."""
    beta2: float = setting(0.95, at_least=0, at_most=0.9999999)
    """Decay of the mean of the squared gradients."""
    adam_epsilon: float = setting(1e-8, above=0)
    """Added to the root of the second moment."""
    grad_clip_thresh: float = setting(1.0, at_least=0)
    """Gradient clipping: gradients are scaled down to this global norm. 0: no clipping."""


@dataclass(frozen=True)
class ScheduleConfig:
    """The learning rate over the run. Durations are steps, or tokens when written as in 2Btok."""

    schedule: str = setting("cosine", choices=SCHEDULES)
    """After a linear warm-up, cosine, linear, polynomial and cosine_with_restarts decay to the floor;
    wsd, wsd_cosine and wsd_sqrt hold, then decay over decay_steps: linearly, as a cosine, as a root;
    inverse_sqrt falls without end; annealing goes straight to 0. fms_cosine, of fms-fsdp, rises
    quadratically and follows the cosine from step 0."""
    polynomial_power: float = setting(1.0, above=0, needs=polynomial)
    """Exponent of polynomial."""
    restart_cycles: int = setting(1, at_least=1, needs=restarts)
    """Number of times that cosine_with_restarts falls from learning_rate to the floor."""
    warmup_steps: Duration = steps(-1, at_least=-1)
    """Warm-up; -1 means a twentieth of the run, at most 2000 steps (annealing and constant:
    none)."""
    warmup_ratio: float = setting(0.0, at_least=0, at_most=1, instead_of="warmup_steps")
    """Warm-up as a share of the schedule's length; 0 leaves it to warmup_steps."""
    decay_steps: Duration = steps(-1, at_least=-1, needs=final_decay)
    """Length of the final decay of wsd. -1: a tenth of the run."""
    schedule_steps: Duration = steps(-1, at_least=-1, needs=end_of_schedule)
    """Length of the schedule; -1 means the length of the run. A longer run keeps the learning rate of
    the schedule's end. If num_steps is raised, the schedule keeps its length, unless the new length
    leaves the present learning rate as it is."""
    min_learning_rate_ratio: float = setting(0.1, at_least=0, at_most=1, needs=floor)
    """Floor of the schedules that decay to a floor, as a share of learning_rate."""


@dataclass(frozen=True)
class TrainingConfig:
    """The loop: length, batch, precision, validation."""

    num_epochs: float = setting(0.0, at_least=0, at_most=1_000_000, instead_of="num_steps")
    """Length of the run in epochs; 0 leaves it to num_steps. An epoch has as many samples as the
    training data has windows of seq_length tokens."""
    num_steps: Duration = steps(1000, at_least=1)
    """Length of the run in steps, or in tokens as in 20Mtok. With a length in tokens, the learning rate
    follows the tokens seen, so that a later change of the global batch does not change its curve."""
    dry_run: bool = setting(False)
    """Print the model, its size, the memory that the run needs and the checkpoint that it would resume
    from, then exit. Nothing is written."""
    batch_size: int = setting(8, at_least=1)
    """Samples per device and forward pass (the micro-batch)."""
    global_batch_size: int = setting(0, at_least=0)
    """Samples per step over all devices, reached by gradient accumulation. 0: batch_size times the
    number of devices."""
    gradient_accumulation_steps: int = setting(1, at_least=1, instead_of="global_batch_size")
    """Forward passes of each device per step. With global_batch_size instead, a step has the same
    samples on any number of devices."""
    seed: int = setting(2023, at_least=0, at_most=2**63 - 1)
    """Seed of the initial weights and of the order of the samples."""
    mixed_precision: str = setting("auto", choices=("auto", "bf16", "fp16", "fp32"))
    """Dtype of the matrix products: bf16, fp16 or fp32. auto: bf16 on a GPU, fp32 on a CPU. Weights,
    their updates, the recurrence and reductions are in fp32. true means bf16, false fp32."""
    kernels: str = setting("auto")
    """Backends of the operators. auto: the fastest that gives correct results on this GPU, for the whole
    run. fused (CUDA libraries), triton, flash (attention), cpp (C on a CPU) or reference (plain
    PyTorch): this backend for every operator that has it. scan=reference,conv=cpp: for these operators only. A
    backend that does not work or gives wrong results is an error."""
    deterministic: bool = setting(False)
    """Use only deterministic operations: two runs with equal settings are equal bit for bit. On a GPU,
    the first minute of the run tests each backend for this; those of the CUDA libraries are not used."""
    max_skipped_steps: int = setting(10, at_least=1)
    """Stop after this many steps in a row with a loss or gradient that is not finite. Such steps
    change no weight."""
    eval_interval: Duration = steps(200, at_least=0, needs=store_or_no_interval)
    """Validation interval; a run also validates at its start and its end. 0: never."""
    eval_batches: int = setting(-1, at_least=-1, needs=validation)
    """Global batches per validation, spread evenly over each store. 0: all data. -1: as many as take a
    twentieth of the time of training between two validations."""
    eval_prompts: str = setting("", needs=validation)
    """A text that the model continues at each validation by 50 tokens, each the likeliest; or several, a
    line each; or the path of a file of such lines. The log, the metrics, the trackers and the report show
    what it writes."""

    def read_prompts(self) -> str:
        """Returns eval_prompts with the lines of a file in place of its name, so that no rank needs the file. Raises
        UserError if it can't be read or is a folder, and for text that is not UTF-8 or blank."""
        given = self.eval_prompts
        prompts = given
        try:
            given.encode()
            # A longer text is no name of a file.
            if given.endswith(".txt") or len(given) < 256 and exists(given):
                prompts = read_text(given) + "\n"
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", error)
            raise UserError(f"eval_prompts={given}: can't be read: {reason}") from None
        if given and not prompts.strip():
            raise UserError(f"eval_prompts={given}: no prompt is there; write one in each line")
        return prompts

    def check(self) -> None:
        """Raises UserError for a global batch that can't be split, and for unknown names in
        `kernels`."""
        if self.global_batch_size % self.batch_size:
            raise UserError(
                f"global_batch_size {self.global_batch_size} is not a multiple of "
                f"batch_size {self.batch_size}"
            )
        demands(self.kernels)

    def precision(self, device_type: str) -> str:
        """Returns the precision of the matrix products on this type of device: bf16, fp16 or fp32."""
        if self.mixed_precision != "auto":
            return self.mixed_precision
        return "fp32" if device_type == "cpu" else "bf16"


@dataclass(frozen=True)
class CheckpointConfig:
    """The run folder, its checkpoints, and what the run starts from."""

    save_ckpt_path: str = setting("runs/train", is_path=True)
    """The run folder. If it holds a committed checkpoint, the run resumes from it, whatever
    load_ckpt_path and init_from say."""
    load_ckpt_path: str = setting("", is_path=True)
    """What a new run starts from. A file (.pth, .pt, .bin, .safetensors): its weights. A run or
    checkpoint folder: weights and optimiser, and with resuming_dataset the position in the data. The
    model takes the shape of the weights, as with init_from. It may be save_ckpt_path itself."""
    resuming_dataset: bool = setting(False)
    """Take the position in the data from load_ckpt_path too."""
    init_from: str = setting("", is_path=True)
    """Weights that a new run starts from: a transformers or state-spaces folder, a run, a checkpoint or a
    .pth file. The model takes the shape of the weights; model settings must agree with it, and must
    describe the model if there is no config.json."""
    checkpoint_interval: Duration = steps(500, at_least=1)
    """Checkpoint interval; a run also saves at its end and when it is stopped."""
    keep_checkpoints: int = setting(3, at_least=1)
    """Number of newest checkpoints to keep. Older checkpoints are removed, unless another process reads
    them."""
    keep_every: Duration = steps(0, at_least=0)
    """The first checkpoint at or after each multiple of this many steps is never removed: to evaluate later, to
    average (mamba-fsdp average), to compute again from (mamba-fsdp replay). 0: any checkpoint may be removed."""
    max_failed_saves: int = setting(5, at_least=1)
    """Stop after this many failed saves in a row. Until then the run keeps training and tries again
    after one minute, two, four and so on."""
    async_checkpoint: bool = setting(True)
    """Write checkpoints while training continues."""
    publish: bool = setting(True)
    """At the end, write the model into pth/ as one file. python -m mamba_fsdp export RUN FOLDER
    --format=pth can also do so later."""

    def names_a_file(self) -> bool:
        """Returns whether load_ckpt_path names a file, which holds only weights."""
        return self.load_ckpt_path.endswith(WEIGHTS_FILES)

    def loads_own_folder(self) -> bool:
        """Returns whether load_ckpt_path is the run folder itself: the run then resumes or, in an empty folder,
        starts."""
        return os.path.realpath(self.load_ckpt_path) == os.path.realpath(self.save_ckpt_path)

    def begins_elsewhere(self) -> bool:
        """Returns whether a new run starts from a model, whose shape its own model takes."""
        return bool(self.init_from or self.load_ckpt_path and not self.loads_own_folder())

    def check(self) -> None:
        """Raises UserError if the settings don't agree on what to start from."""
        if self.load_ckpt_path and self.init_from:
            raise UserError("load_ckpt_path and init_from both say what to start from; give one")
        if self.resuming_dataset and (not self.load_ckpt_path or self.names_a_file()):
            raise UserError(
                "resuming_dataset needs load_ckpt_path to be a run or checkpoint folder, "
                "which knows the data's position"
            )


@dataclass(frozen=True)
class ParallelConfig:
    """How the model is spread over the devices."""

    sharding_strategy: str = setting("auto", choices=("auto", "fsdp", "hsdp", "ddp", "none"))
    """fsdp shards over all devices; hsdp shards within a node and replicates across nodes; ddp
    replicates. auto: fsdp, or none on one device."""
    fsdp_activation_checkpointing: bool = setting(False)
    """Recompute activations in the backward pass instead of keeping them: less memory, more
    time."""
    selective_checkpointing: str = setting("1", needs=recomputing)
    """Share of the blocks that recompute their activations, as in 1/3 or 0.33. 0: none."""
    accumulate_unsharded: bool = setting(False, needs=sharding)
    """Sum a step's gradients on each device before they are reduced. Gradient accumulation then
    sends less, but each device holds the whole model's gradients in fp32."""
    context_parallel: int = setting(1, at_least=1)
    """Number of neighbouring devices that share each sequence, for sequences too long for one device.
    Each of N devices computes 1/N of the positions."""
    use_torch_compile: bool = setting(False)
    """Compile each block with torch.compile and, on a GPU, the loss."""
    timeout_minutes: float = setting(10.0, above=0, at_most=100_000)
    """A rank without progress for this long prints its stack traces and ends the job. Raise it if
    compiling or slow data needs more."""

    def selective_share(self) -> Fraction:
        """Returns selective_checkpointing as a number in [0, 1]. Raises UserError for other text."""
        text = self.selective_checkpointing
        share = Fraction(-1)
        if re.fullmatch(r"[\d./]{1,20}(e-\d)?", text):  # a huge exponent would never end
            with contextlib.suppress(ValueError, ZeroDivisionError):
                share = Fraction(text)
        if not 0 <= share <= 1:
            raise UserError(
                f"selective_checkpointing={text!r} must be a share, at least 0 and at most 1, "
                "as in 1/3 or 0.33"
            )
        return share


@dataclass(frozen=True)
class ReportConfig:
    """What the run shows and records."""

    report_interval: Duration = steps(20, at_least=1)
    """Steps, or tokens, between entries in metrics.jsonl and the log."""
    tracker: list[str] = setting([], choices=("tensorboard", "wandb"))
    """Send metrics to these trackers too, as in tensorboard,wandb. TensorBoard's files go to the run
    folder. none: no tracker."""
    wandb_project: str = setting("", needs=wandb)
    """Project in W&B. Empty: WANDB_PROJECT in the environment, else mamba-fsdp."""
    wandb_name: str = setting("", needs=wandb)
    """Name of the run in W&B. Empty: WANDB_NAME in the environment, else the run folder's name."""
    use_profiler: bool = setting(False)
    """Record a torch profile of steps 5 to 7 of this start into profile/rank_R.json in the run
    folder, and print a summary."""


def command_began() -> float:
    """Returns when the command was started, which 1.train.sbatch says, or the time now."""
    return float(os.environ.get("COMMAND_BEGAN") or time.time())


@dataclass(frozen=True)
class TrainConfig:
    """All settings of a run. They never change: `changed` returns others."""

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
    # Lines for the run's log about words of other launchers, and about values that follow from others or have no effect.
    notes: tuple[str, ...] = field(default=(), compare=False)
    # Whether save_ckpt_path was given for this model and data.
    names_folder: bool = field(default=False, compare=False)
    # When the command was started, in seconds since the epoch.
    began: float = field(default_factory=command_began, compare=False)

    def value(self, name: str) -> Any:
        """Returns the value of the setting `name`."""
        section, _ = all_settings()[name]
        return getattr(getattr(self, section), name)

    def changed(self, **values: Any) -> "TrainConfig":
        """Returns these settings with other values, by the settings' names."""
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
        """Returns whether the setting `name` has an effect with the others."""
        section, leaf = all_settings()[name]
        return has_effect(leaf, self.model if section == "model" else self)

    def fitted(self) -> "TrainConfig":
        """Returns these settings with other values for those that the user did not give, if they can't go with the
        rest; `notes` say so."""
        settings = self
        for name, value_that_fits in FITTING.items():
            usual = settings.value(name)
            value = value_that_fits(settings)
            if name not in self.explicit and value != usual and settings.has_effect(name):
                note = f"{name}={value} instead of {usual}, to fit the other settings"
                settings = settings.changed(**{name: value})
                settings = dataclasses.replace(settings, notes=(*settings.notes, note))
        return settings

    def check(self) -> None:
        """Raises UserError for combinations that can't work, before any process group or GPU
        starts."""
        if not self.checkpoint.begins_elsewhere():
            self.check_model()
        self.data.check()
        self.training.check()
        self.checkpoint.check()
        self.parallel.selective_share()
        if self.parallel.context_parallel > 1 and self.training.eval_prompts:
            raise UserError(
                f"eval_prompts: ranks that share sequences (context_parallel={self.parallel.context_parallel}) can't "
                "continue texts; leave one of them out"
            )

    def check_model(self) -> None:
        """Raises UserError for a model that can't be trained with these settings; call it once the model's
        shape is known."""
        self.model.check()
        if self.parallel.context_parallel > 1 and self.model.has_mixer("gdn"):
            raise UserError(
                f"context_parallel={self.parallel.context_parallel}: Gated DeltaNet (layers gdn) hands on no states "
                "between ranks; leave it at 1"
            )

    def operator_uses(self, device_type: str) -> dict[str, list[Use]]:
        """Returns the uses of each operator in the training on this type of device."""
        from mamba_fsdp.conventions import DTYPES  # needs torch, which a command line does not

        return spec.operator_uses(
            self.model,
            DTYPES[self.training.precision(device_type)],
            self.data.reset_at_documents,
            self.training.deterministic,
            self.parallel.context_parallel > 1,
            tokens=self.training.batch_size * self.own_positions(),
        )

    def own_positions(self) -> int:
        """Returns how many positions of each sequence a rank computes."""
        sharing = self.parallel.context_parallel
        if sharing == 1:
            return self.data.seq_length
        least = self.model.d_conv - 1  # the next rank's convolution reads so many positions
        return max(-(-self.data.seq_length // sharing), least)


# How `fitted` adapts settings, in this order.


def fitting_headdim(settings: TrainConfig) -> int:
    model = settings.model
    per_group = model.d_inner // math.gcd(model.d_inner, model.ngroups)
    return math.gcd(model.headdim, per_group)


def fitting_n_head(settings: TrainConfig) -> int:
    model = settings.model
    return model.n_head if model.head_dim else math.gcd(model.n_head, model.d_model)


def fitting_n_kv_head(settings: TrainConfig) -> int:
    model = settings.model
    return model.n_head if model.n_head % model.n_kv_head else model.n_kv_head


def fitting_rotary_dim(settings: TrainConfig) -> int:
    model = settings.model
    return -1 if model.rotary_dim > model.resolved_head_dim else model.rotary_dim


def fitting_batch_size(settings: TrainConfig) -> int:
    return math.gcd(settings.training.batch_size, settings.training.global_batch_size)


def fitting_global_batch_size(settings: TrainConfig) -> int:
    return round_up(settings.training.global_batch_size, settings.training.batch_size)


FITTING: dict[str, Callable[[TrainConfig], Any]] = {
    "headdim": fitting_headdim,
    "ngroups": lambda settings: math.gcd(settings.model.ngroups, settings.model.n_ssm_head),
    "n_head": fitting_n_head,
    "n_kv_head": fitting_n_kv_head,
    "rotary_dim": fitting_rotary_dim,
    "multipliers": lambda settings: settings.model.applicable_multipliers(),
    "batch_size": fitting_batch_size,
    "global_batch_size": fitting_global_batch_size,
}

SECTIONS: dict[str, Any] = {
    section.name: section.default_factory
    for section in dataclasses.fields(TrainConfig)
    if dataclasses.is_dataclass(section.default_factory)
}


@lru_cache(maxsize=None)
def all_settings() -> dict[str, tuple[str, dataclasses.Field]]:
    """Returns {leaf name: (section name, dataclass field)}."""
    settings: dict[str, tuple[str, dataclasses.Field]] = {}
    for section, kind in SECTIONS.items():
        for leaf in dataclasses.fields(kind):
            assert leaf.name not in settings, f"two settings are called {leaf.name}"
            settings[leaf.name] = (section, leaf)
    return settings


@lru_cache(maxsize=None)
def setting_names() -> dict[str, str]:
    """Returns {name of a setting, with or without its section: the name without it}."""
    with_sections = {f"{section}.{name}": name for name, (section, _) in all_settings().items()}
    return with_sections | {name: name for name in all_settings()}
