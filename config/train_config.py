"""Every setting of a training run: name, type, default, bounds and meaning (the string below each
field).

Leaf names are unique over the sections, so `--learning_rate=3e-4`, `--optimizer.learning_rate=3e-4`
and the YAML forms `learning_rate: 3e-4` and `optimizer: {learning_rate: 3e-4}` name the same thing.
config/resolve.py resolves them.
"""

import dataclasses
from dataclasses import dataclass, field
from fractions import Fraction
from functools import lru_cache
from typing import Any

from config.fields import Duration, condition, setting
from config.model_config import ModelConfig
from mamba_fsdp.errors import UserError
from mamba_fsdp.ops.backends import demands


def steps(default: int, **more: Any) -> Any:
    return setting(Duration(default, "steps"), **more)


# What must hold for a setting to have an effect.


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


@condition("position_weighting=true")
def weighting(settings: "TrainConfig") -> bool:
    return settings.data.position_weighting


@condition("schedule=wsd")
def final_decay(settings: "TrainConfig") -> bool:
    return settings.lr_schedule.schedule == "wsd"


@condition("a schedule other than constant")
def end_of_schedule(settings: "TrainConfig") -> bool:
    return settings.lr_schedule.schedule != "constant"


@condition(
    "a schedule that decays to a floor: cosine, linear, or wsd with decay_steps other than 0"
)
def floor(settings: "TrainConfig") -> bool:
    falls_to_it = settings.lr_schedule.schedule in ("cosine", "linear", "wsd")
    return falls_to_it and settings.lr_schedule.decay_steps.count != 0


@condition("fsdp_activation_checkpointing=true")
def recomputing(settings: "TrainConfig") -> bool:
    return settings.parallel.fsdp_activation_checkpointing


@condition("sharding_strategy=fsdp or hsdp")
def sharding(settings: "TrainConfig") -> bool:
    return settings.parallel.sharding_strategy in ("auto", "fsdp", "hsdp")


@condition("tracker=wandb")
def wandb(settings: "TrainConfig") -> bool:
    return "wandb" in settings.report.tracker


@dataclass
class DataConfig:
    """What is read, and in what order."""

    dataset_path: str = setting("data/builtin")
    """Token store made by get_dataset.py, or a folder that holds several of them (see datasets).
    data/builtin is made where it is missing."""
    datasets: list[str] = setting([])
    """Names of the stores inside dataset_path to mix, as in code,text; empty means its train store,
    or itself."""
    weights: list[float] = setting([])
    """Shares of the datasets in the samples, in their order, on any scale; empty means in
    proportion to their tokens."""
    validation_path: str = setting("auto", needs=interval_or_no_store)
    """Token store that validation reads; auto takes what is called validation beside the training
    data, none does without."""
    allow_other_tokenizer: bool = setting(False)
    """Let tokens of different tokenizers meet: of the datasets, the validation, and the model that
    the run starts or resumes from."""
    use_dummy_dataset: bool = setting(False)
    """Train on made-up tokens instead of data, for benchmarks: they count up through the
    vocabulary, without end."""
    seq_length: int = setting(256, at_least=1)
    """Tokens per sample. It comes with model_name: 256 for demo, 2048 for mamba-* and mamba2-*,
    4096 for the others and for state-spaces/mamba-*, as the AWS test case writes them."""
    reset_at_documents: bool = setting(False)
    """Let no state, convolution or attention cross the start of a document within a sample."""
    position_weighting: bool = setting(False)
    """Weight each token's loss with tanh(p / position_window), p the tokens of its document that
    stand before it in the sample: what can be guessed from little counts little. The mean is over
    the weights of the global batch."""
    position_window: float = setting(10.0, above=0, needs=weighting)
    """Tokens after which position_weighting gives three quarters of the full weight."""
    num_workers: int = setting(1, at_least=0, at_most=64)
    """Threads per rank that read batches ahead; 0 reads each when it is needed."""
    prefetch: int = setting(2, at_least=1, at_most=1024, needs=workers)
    """Steps read ahead."""

    def check(self) -> None:
        """Raises UserError for weights that are no shares of the datasets."""
        if not self.weights:
            return
        if len(self.weights) != len(self.datasets):
            raise UserError(
                f"weights has {len(self.weights)} values but datasets {len(self.datasets)} names; "
                "give one weight each"
            )
        if min(self.weights) < 0 or sum(self.weights) == 0:
            raise UserError(f"weights {self.weights} must not be negative nor all zero")


@dataclass
class OptimizerConfig:
    """AdamW; weight decay only on matrices (not on norms, biases, A_log, D, dt_bias)."""

    learning_rate: float = setting(3e-4, above=0)
    """Peak learning rate."""
    weight_decay: float = setting(0.1, at_least=0)
    """Decoupled weight decay."""
    beta1: float = setting(0.9, at_least=0, at_most=0.9999999)
    """Decay of the mean of the gradients."""
    beta2: float = setting(0.95, at_least=0, at_most=0.9999999)
    """Decay of the mean of their squares."""
    adam_epsilon: float = setting(1e-8, above=0)
    """Added to the root of the second moment."""
    grad_clip_thresh: float = setting(1.0, at_least=0)
    """Gradients are scaled down to this global norm; 0 leaves them as they are."""


@dataclass
class ScheduleConfig:
    """The learning rate over the run. Durations are steps, or tokens when written as in 2Btok."""

    schedule: str = setting("cosine", choices=("cosine", "wsd", "linear", "constant", "annealing"))
    """cosine and linear decay to the floor; wsd holds, then decays linearly over decay_steps;
    annealing goes straight to 0."""
    warmup_steps: Duration = steps(-1, at_least=-1)
    """Warm-up; -1 means a twentieth of the run, at most 2000 steps (annealing and constant:
    none)."""
    decay_steps: Duration = steps(-1, at_least=-1, needs=final_decay)
    """Length of the final decay of wsd; -1 means a tenth of the run."""
    schedule_steps: Duration = steps(-1, at_least=-1, needs=end_of_schedule)
    """Length of the schedule where it is not that of the run: a longer run stays where it ends; -1
    means the run's. A run that is made longer keeps the length that it had where its learning rate
    would change."""
    min_learning_rate_ratio: float = setting(0.1, at_least=0, at_most=1, needs=floor)
    """Floor of cosine, wsd and linear, as a share of learning_rate."""


@dataclass
class TrainingConfig:
    """The loop."""

    num_epochs: float = setting(0.0, at_least=0, instead_of="num_steps")
    """Length of the run in epochs; 0 leaves it to num_steps. An epoch is as many samples as the
    sources of the mixture have windows of seq_length tokens together, so that weights left out read
    each window once."""
    num_steps: Duration = steps(1000, at_least=1)
    """Length of the run in steps, or tokens as in 20Mtok: then the learning rate is a function of
    the tokens seen, which another global batch later in the run does not bend."""
    dry_run: bool = setting(False)
    """Say what would be trained, how large it is and what memory it takes, and stop there: nothing
    is written."""
    batch_size: int = setting(8, at_least=1)
    """Samples per device and forward pass."""
    global_batch_size: int = setting(0, at_least=0)
    """Samples per step over all devices, reached by gradient accumulation; 0 means batch_size times
    the devices."""
    gradient_accumulation_steps: int = setting(1, at_least=1, instead_of="global_batch_size")
    """Forward passes of each device per step: what a step has, where the number of devices is to
    decide on it. With global_batch_size a step has the same samples on any number of them."""
    seed: int = setting(2023, at_least=0)
    """Seed of the initial weights and of the order of samples."""
    mixed_precision: str = setting("bf16", choices=("bf16", "fp16", "fp32"))
    """Precision of the matrix products; weights, their update, the recurrence and reductions are
    fp32. true means bf16, false fp32."""
    kernels: str = setting("auto")
    """Backends of the operators: auto takes the fastest of those that prove right on this GPU, and
    keeps to them for the run; fused (CUDA libraries), triton, cpp (C on a CPU) or reference (plain
    PyTorch) demands that backend of all that have it, scan=reference,conv=cpp of those named. What
    can't serve or is wrong is an error."""
    deterministic: bool = setting(False)
    """Take only what repeats, so that two equal runs are equal bit for bit. On a GPU each backend
    must repeat in the run's first minute; those of the CUDA libraries are passed over."""
    max_skipped_steps: int = setting(10, at_least=1)
    """Stop after this many steps in a row whose loss or gradient was not finite (none of them is
    applied)."""
    eval_interval: Duration = steps(200, at_least=0, needs=store_or_no_interval)
    """Validate every so often, at the start and at the end; 0 never."""
    eval_batches: int = setting(-1, at_least=-1, needs=validation)
    """Global batches that a validation reads, spread evenly over each store; 0 means all of it, -1
    as many as cost a twentieth of the training between two validations."""

    def check(self) -> None:
        """Raises UserError for a global batch that can't be split, and for `kernels` that there are
        not."""
        if self.global_batch_size % self.batch_size:
            raise UserError(
                f"global_batch_size {self.global_batch_size} is no multiple of "
                f"batch_size {self.batch_size}"
            )
        demands(self.kernels)


@dataclass
class CheckpointConfig:
    """Where the run lives, and what it starts from."""

    save_ckpt_path: str = setting("runs/train")
    """The run folder. A committed checkpoint in it always wins: the run resumes from there."""
    load_ckpt_path: str = setting("")
    """Start from this: a file (.pth, .pt, .bin, .safetensors) gives the model; a run or checkpoint
    folder the optimiser too, and with resuming_dataset the position in the data. The same folder as
    save_ckpt_path may be empty at first."""
    resuming_dataset: bool = setting(False)
    """Take the position in the data from load_ckpt_path too."""
    init_from: str = setting("")
    """Start from these weights: a transformers or state-spaces folder, a run, a checkpoint, a .pth
    file. Its shape is the model's, and model settings that are given must agree with it; where
    there is no config.json, they say it."""
    checkpoint_interval: Duration = steps(500, at_least=1)
    """Save a checkpoint every so often; one is always saved at the end and when stopped."""
    keep_checkpoints: int = setting(3, at_least=1)
    """Committed checkpoints kept; older ones are removed, but none that another process reads."""
    keep_every: Duration = steps(0, at_least=0)
    """The first checkpoint at or after each multiple of this many steps is never removed. 0: all may be."""
    max_failed_saves: int = setting(5, at_least=1)
    """Stop after so many saves in a row that failed; until then the run trains on and tries again
    after a minute, then two, then four ..."""
    async_checkpoint: bool = setting(True)
    """Write checkpoints while training continues."""
    publish: bool = setting(True)
    """At the end, write the model as one file into pth/; without it: python -m mamba_fsdp import
    RUN FOLDER."""

    def names_a_file(self) -> bool:
        """Whether load_ckpt_path names a file, of weights alone."""
        return self.load_ckpt_path.endswith((".pth", ".pt", ".bin", ".safetensors"))

    def check(self) -> None:
        """Raises UserError where the settings don't agree on what to start from."""
        if self.load_ckpt_path and self.init_from:
            raise UserError("load_ckpt_path and init_from both say what to start from; give one")
        if self.resuming_dataset and (not self.load_ckpt_path or self.names_a_file()):
            raise UserError(
                "resuming_dataset needs load_ckpt_path to be a run or checkpoint folder, "
                "which knows the data's position"
            )


@dataclass
class ParallelConfig:
    """How the model is spread over the devices."""

    sharding_strategy: str = setting("auto", choices=("auto", "fsdp", "hsdp", "ddp", "none"))
    """fsdp shards over all devices, hsdp within a node and replicates across, ddp replicates; auto:
    fsdp, or none on one device."""
    fsdp_activation_checkpointing: bool = setting(False)
    """Recompute activations in the backward pass instead of keeping them."""
    selective_checkpointing: str = setting("1", needs=recomputing)
    """Share of the blocks that recompute, as a fraction: 1/3 or 0.33; 0 none."""
    accumulate_unsharded: bool = setting(False, needs=sharding)
    """Sum a step's gradients before they are reduced: less traffic with gradient accumulation, but
    each device then holds the gradients of the whole model in fp32."""
    low_cpu_fsdp: bool = setting(True)
    """Build the model without storage and fill each rank's shard alone."""
    use_torch_compile: bool = setting(False)
    """Compile each block and, on a GPU, the loss."""
    timeout_minutes: float = setting(10.0, above=0)
    """A rank that makes no progress for so long prints where it stands and ends the job; give more
    where compiling or data on a slow disk needs it."""

    def selective_share(self) -> Fraction:
        """selective_checkpointing as a number in [0, 1]. Raises UserError where it is none."""
        text = self.selective_checkpointing
        try:
            share = Fraction(text)
        except (ValueError, ZeroDivisionError):
            share = Fraction(-1)
        if not 0 <= share <= 1:
            raise UserError(
                f"selective_checkpointing={text!r} must be a share, at least 0 and at most 1, "
                "as in 1/3 or 0.33"
            )
        return share


@dataclass
class ReportConfig:
    """What is shown and recorded."""

    report_interval: Duration = steps(20, at_least=1)
    """Steps, or tokens, between lines in metrics.jsonl and the log."""
    tracker: list[str] = setting([], choices=("tensorboard", "wandb"))
    """Send the metrics there too, as in tensorboard,wandb; tensorboard's files lie in the run
    folder; none is none of them."""
    wandb_project: str = setting("", needs=wandb)
    """Project in W&B; empty takes WANDB_PROJECT of the environment, else mamba-fsdp."""
    wandb_name: str = setting("", needs=wandb)
    """Name of the run there; empty takes WANDB_NAME of the environment, else the run folder's."""
    use_profiler: bool = setting(False)
    """Record a torch profile of steps 5 to 7 of this start into the run folder
    (profile/rank_R.json), and say what it shows."""


@dataclass
class TrainConfig:
    """All settings of a run. `notes`: lines for its log on what was given in words of other
    launchers."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    lr_schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    report: ReportConfig = field(default_factory=ReportConfig)

    def __post_init__(self) -> None:
        self.notes: list[str] = []

    def check(self) -> None:
        """Raises UserError for combinations that can't work, before any process group or GPU
        starts."""
        if not self.checkpoint.init_from:  # else its weights tell the model's shape
            self.model.check()
        self.data.check()
        self.training.check()
        self.checkpoint.check()
        self.parallel.selective_share()


SECTIONS: dict[str, Any] = {
    section.name: section.default_factory for section in dataclasses.fields(TrainConfig)
}


@lru_cache(maxsize=None)
def all_settings() -> dict[str, tuple[str, dataclasses.Field]]:
    """{leaf name: (section name, dataclass field)}."""
    found: dict[str, tuple[str, dataclasses.Field]] = {}
    for section, kind in SECTIONS.items():
        for leaf in dataclasses.fields(kind):
            assert leaf.name not in found, f"two settings are called {leaf.name}"
            found[leaf.name] = (section, leaf)
    assert not found.keys() & SECTIONS.keys(), "a setting is called like a section"
    return found


@lru_cache(maxsize=None)
def setting_names() -> dict[str, str]:
    """{name of a setting, with its section or without: the name without}."""
    names = {}
    for name, (section, _) in all_settings().items():
        names[name] = name
        names[f"{section}.{name}"] = name
    return names
