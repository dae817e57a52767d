"""Finds the starting point of a run: everything that depends on files at the start, as one value.

Rank 0 finds and checks it, and all ranks get the same value. Afterwards, no decision of the training depends on files.
A dry run prints the starting point.
"""

from dataclasses import dataclass, replace
from pathlib import Path

from mamba_fsdp.checkpoint.restore import CheckpointCandidate, find_newest_checkpoint
from mamba_fsdp.checkpoint.saved_run import SavedRun, TrainState
from mamba_fsdp.data.loader import split_step
from mamba_fsdp.data.sampler import Sampler
from mamba_fsdp.data.selection import (
    check_tokenizers_agree,
    representative_source,
    training_sources,
    validation_sources,
)
from mamba_fsdp.data.source import DummySource, Source
from mamba_fsdp.data.tokenizer import TextTokenizer, check_tokenizer, import_hint, load_for_prompts
from mamba_fsdp.errors import UserError
from mamba_fsdp.importing.builtin import missing_builtin
from mamba_fsdp.interop.architectures import exportable
from mamba_fsdp.interop.places import Origin, find_origin
from mamba_fsdp.interop.weights import Weights, find_weights
from mamba_fsdp.model.config import parse_model_config
from mamba_fsdp.parallel.world import World
from mamba_fsdp.reporting.console import PrintLine
from mamba_fsdp.run.names import SETTINGS
from mamba_fsdp.run.records import read_events, was_validated
from mamba_fsdp.settings import resolve
from mamba_fsdp.settings.train_config import TrainConfig
from mamba_fsdp.trainer.schedule import (
    RunSchedule,
    expected_time,
    print_length,
    run_length,
    schedule_run,
)

SAMPLE_LENGTH = 50  # number of tokens generated for each prompt of eval_prompts
MIN_PASSES_TO_WARN = 16  # a step with at least this many forward passes gets a warning
MAX_SAMPLED_TOKENS = 1 << 14  # the limit for all prompts and generated tokens together


@dataclass(frozen=True)
class RunData:
    """The data of a run."""

    # {name: training data}; empty in a dry run if data/builtin is missing.
    sources: dict[str, Source]
    shares: dict[str, float]  # {name: share of the samples}
    validation: dict[str, Source]  # {name of the training data: validation data}
    prompts: list[list[int]]  # token ids of each line of eval_prompts

    def validation_identities(self) -> dict[str, str]:
        """Returns {name: identity} of the validation data.

        If two starts have equal identities, their validation losses are comparable.
        """
        return {name: source.identity for name, source in self.validation.items()}

    def stores(self) -> list[Source]:
        """Returns all training and validation data."""
        return [*self.sources.values(), *self.validation.values()]

    def sampler(self, settings: TrainConfig, state: TrainState) -> Sampler:
        """Returns the sampler for the order of samples, at the position of `state`."""
        return Sampler(
            self.sources,
            self.shares,
            settings.data.seq_length,
            settings.training.seed,
            state=state.data or None,
        )


@dataclass(frozen=True)
class StartingPoint:
    """The starting point of a run.

    If its checkpoint turns out to be damaged, another starting point is made from an older checkpoint.
    """

    settings: TrainConfig  # the settings, completed with the model of the weights and the precision of the device
    origin: Origin
    checkpoint: CheckpointCandidate | None  # the checkpoint that initializes model and optimizer
    # The weights that initialize the model. Without a checkpoint and weights, the model is initialized at random.
    weights: Weights | None
    origin_description: str  # description of the checkpoint or the weights, for the log
    data: RunData
    state: TrainState  # the train state before the first step; training changes a copy
    schedule: RunSchedule | None  # None in a dry run if data/builtin is missing
    validation_due: bool  # whether to validate before the first step
    changed: str  # description of the settings that have changed since the run's last start
    notes: tuple[str, ...]  # lines for the log about the settings
    lines: tuple[str, ...]  # other lines for the log


def find_starting_point(
    settings: TrainConfig, folder: Path, world: World, print_line: PrintLine, path: str | Path = ""
) -> StartingPoint:
    """Finds the starting point of a run. Only rank 0 calls it, after it has acquired the run folder.

    A run starts from the newest checkpoint in its folder, otherwise from the weights or the checkpoint that the
    settings name, otherwise from random weights. path: the checkpoint to start from, if newer ones turned out to be
    damaged. world: the ranks of the run, or the planned ranks of a dry run. print_line: prints a line about each
    checkpoint that is skipped.

    Raises UserError if settings, data, model and checkpoint do not fit together.
    """
    precision = settings.training.precision(world.device.type)
    settings = settings.with_values(mixed_precision=precision)
    origin = find_origin(settings.checkpoint)
    checkpoint = None
    saved = None
    weights = None
    if origin.is_checkpoint:
        checkpoint = find_newest_checkpoint(Path(path or origin.path), print_line)
        saved = SavedRun.from_state(checkpoint.contents.state, checkpoint.path)
        settings = adopt_saved(settings, origin, saved, checkpoint.path)
    elif origin.setting:
        settings, weights = adopt_weights(settings, origin)
    data = open_data(settings)
    settings = adopt_vocabulary(settings, origin, data)
    check_vocabulary(settings, origin, weights, data)
    lines: list[str] = []
    try:
        exportable(settings.model)
    except UserError as error:
        lines.append(f"export     {error}; export --format=pth works")
    print_data(settings, data, origin, lines.append)
    state, description = initial_state(settings, origin, checkpoint, saved, weights, data)
    print_origin(settings, origin, checkpoint, description, lines.append)
    schedule = None
    validation_due = False
    if data.sources:
        schedule = plan_steps(settings, data, state, world.size, lines.append)
        validation_due = schedule.is_due(schedule.eval_steps, state.step)
        if validation_due and state.step:
            validation_due = not was_validated(folder, state.step)
    changed = resolve.changed_settings(settings)
    if validation_data_changed(folder, data):
        changed = ", ".join(filter(None, [changed, "the validation data"]))
    notes = [*settings.notes, *resolve.note_on_recipe(settings)]
    if changed:
        remedy = f"--config={folder / SETTINGS} keeps the settings of the last start"
        notes.append(f"changed since the last start: {changed}; {remedy}")
    return StartingPoint(
        settings=settings,
        origin=origin,
        checkpoint=checkpoint,
        weights=weights,
        origin_description=description,
        data=data,
        state=state,
        schedule=schedule,
        validation_due=validation_due,
        changed=changed,
        notes=tuple(notes),
        lines=tuple(lines),
    )


def validation_data_changed(folder: Path, data: RunData) -> bool:
    """Returns whether the last start that validated used other validation data. False if no start validated."""
    earlier = [event["validation"] for event in read_events(folder) if "validation" in event]
    return bool(earlier and data.validation) and earlier[-1] != data.validation_identities()


def adopt_saved(
    settings: TrainConfig, origin: Origin, saved: SavedRun, checkpoint: Path
) -> TrainConfig:
    """Returns the settings with values adopted from a checkpoint.

    These are the model's vocabulary size or, if the checkpoint is from another run, all settings of the model. Raises
    UserError if the checkpoint's model differs from the settings, or if the checkpoint was saved with another
    optimizer.
    """
    model = parse_model_config(checkpoint, saved.model)
    if settings.checkpoint.starts_from_model():
        settings = resolve.adopt_model(settings, model, f"{origin.setting} {checkpoint}")
    else:
        remedy = f"; give the values of the checkpoint, or another {origin.setting}"
        settings = resolve.with_vocabulary_of(settings, model)
        resolve.check_same_model(settings, model, str(checkpoint), remedy)
    if saved.optimizer != settings.optimizer.optimizer:
        raise UserError(
            f"{checkpoint} was saved with optimizer={saved.optimizer}; give this optimizer again, or start another "
            f"run with its weights: init_from={checkpoint}"
        )
    return settings


def adopt_weights(settings: TrainConfig, origin: Origin) -> tuple[TrainConfig, Weights]:
    """Returns (the settings with the model of the weights at `origin`, these weights). The weights are not opened yet.

    Raises UserError if the settings ask for another model.
    """
    names_a_model = settings.explicit & vars(settings.model).keys()
    weights = find_weights(origin.path, settings.model if names_a_model else None)
    source = f"{origin.setting} {origin.path}"
    return resolve.adopt_model(settings, weights.config, source), weights


def adopt_vocabulary(settings: TrainConfig, origin: Origin, data: RunData) -> TrainConfig:
    """Returns the settings with the vocabulary size of the data, and adds a note about the change.

    If vocab_size is given, or if the weights are not random, the settings are returned unchanged.
    """
    usual = settings.model.vocab_size
    vocab_size = max((store.vocab_size for store in data.stores()), default=usual)
    if origin.setting or "vocab_size" in settings.explicit or vocab_size == usual:
        return settings
    note = f"vocab_size={vocab_size}, the size in the data, instead of {usual}"
    return replace(settings.with_values(vocab_size=vocab_size), notes=(*settings.notes, note))


def check_vocabulary(
    settings: TrainConfig, origin: Origin, weights: Weights | None, data: RunData
) -> None:
    """Raises UserError for data with a larger vocabulary than the model."""
    vocab_size = settings.model.vocab_size
    for store in data.stores():
        if store.vocab_size > vocab_size:
            remedy = f"set vocab_size={store.vocab_size}"
            if origin.setting:
                model = weights or find_weights(origin.path)
                remedy = import_hint(model.tokenizer_path)
            raise UserError(
                f"{store.path} has a vocabulary of {store.vocab_size} tokens, but the model only {vocab_size}; {remedy}"
            )


def initial_state(
    settings: TrainConfig,
    origin: Origin,
    checkpoint: CheckpointCandidate | None,
    saved: SavedRun | None,
    weights: Weights | None,
    data: RunData,
) -> tuple[TrainState, str]:
    """Returns (the train state before the first step, a description of the checkpoint or the weights for the log).

    Raises UserError if the model is known to have been trained with another tokenizer than the data.
    """
    state = TrainState()
    source: str | Path = origin.path
    trained_with: list[str] = []
    begins = "the start"
    if weights:
        trained_with = list(weights.tokenizer_identities())
        begins = f"the weights in {source}"
    elif checkpoint and saved:
        source = checkpoint.path
        trained_with = [saved.progress.tokenizer]
        begins = f"checkpoint {source.name}"
        if origin.is_own:
            state = saved.progress
        else:
            state.optimizer_steps = saved.progress.optimizer_steps
            begins = f"model and optimiser in {source}, the data from its start"
            if settings.checkpoint.resuming_dataset:
                state.data = saved.progress.data
                begins = f"model and optimiser in {source}, the data's position"
    if data.sources:
        tokens = representative_source(data.sources.values())
        if not settings.data.allow_other_tokenizer:
            check_tokenizer(tokens.path, tokens.tokenizer, source, trained_with)
        state.tokenizer = tokens.tokenizer
    return state, begins


def print_origin(
    settings: TrainConfig,
    origin: Origin,
    checkpoint: CheckpointCandidate | None,
    origin_description: str,
    print_line: PrintLine,
) -> None:
    """Prints the checkpoint or the weights that the run starts from.

    If the model is initialized at random, prints a line only if the settings name the run folder as the checkpoint.
    """
    config = settings.checkpoint
    first = config.init_from or config.load_ckpt_path
    if origin.is_own and checkpoint:
        other = ""
        if first and not config.loads_own_folder():
            other = f"; {first} was used for its first start only"
        print_line(f"resumes    from {checkpoint.path}, step {checkpoint.contents.step}{other}")
    elif origin.setting:
        print_line(f"starting   from {origin_description}")
    elif first:
        print_line(
            f"starting   from random weights: load_ckpt_path {first} is the run folder and has no checkpoint yet"
        )


def plan_steps(
    settings: TrainConfig, data: RunData, state: TrainState, ranks: int, print_line: PrintLine
) -> RunSchedule:
    """Returns the schedule of the run from `state` on, and prints its steps and the expected time.

    Raises UserError if the settings do not fit the data, for example eval_prompts without validation data.
    """
    sampler = data.sampler(settings, state)
    length = run_length(settings, sampler)
    global_batch = split_step(settings, 0, ranks).global_batch
    schedule = schedule_run(settings, global_batch, state, length, len(data.validation), print_line)
    print_length(settings, schedule, sampler.epoch_windows, print_line)
    print_line(f"time       {expected_time(state, schedule.total_steps)}")
    print_passes(settings, global_batch, ranks, print_line)
    if settings.training.eval_prompts and not schedule.eval_steps:
        raise UserError("eval_prompts: the run has no validation data; set validation_path")
    return schedule


def print_passes(
    settings: TrainConfig, global_batch: int, ranks: int, print_line: PrintLine
) -> None:
    """Prints a warning if a step takes many forward passes because of the global batch of a recipe.

    The warning is omitted if global_batch_size is given.
    """
    samples = settings.training.batch_size * ranks // settings.parallel.context_parallel
    passes = global_batch // samples
    if passes < MIN_PASSES_TO_WARN or "global_batch_size" in settings.explicit:
        return
    print_line(
        f"warning    a step takes {passes} passes of {samples} samples, since {settings.model.model_name}'s recipe has a global "
        f"batch of {global_batch}: --global_batch_size={samples} takes one"
    )


def open_data(settings: TrainConfig) -> RunData:
    """Opens the data that the settings name. If a dry run finds no data/builtin, the result is empty.

    Raises UserError if other data is missing, or if the tokenizers differ.
    """
    if settings.data.use_dummy_dataset:
        dummy = DummySource(settings.model.vocab_size)
        name = dummy.path.name
        return RunData({name: dummy}, {name: 1.0}, {}, [])
    if settings.training.dry_run and missing_builtin(settings.data):
        return RunData({}, {}, {}, [])
    sources, shares = training_sources(settings.data)
    validation = validation_sources(settings.data)
    if not settings.data.allow_other_tokenizer:
        check_tokenizers_agree([*sources.values(), *validation.values()])
    prompts = []
    if settings.training.eval_prompts:
        tokenizer = load_for_prompts(representative_source(sources.values()).tokenizer_path)
        prompts = encode_prompts(settings.training.eval_prompts, tokenizer)
    return RunData(sources, shares, validation, prompts)


def encode_prompts(text: str, tokenizer: TextTokenizer) -> list[list[int]]:
    """Returns the token ids of each non-empty line of eval_prompts.

    Raises UserError if the prompts and their continuations take more than MAX_SAMPLED_TOKENS tokens.
    """
    prompts = [*filter(None, map(tokenizer.encode, text.splitlines()))]
    longest = max(map(len, prompts), default=0)
    tokens = len(prompts) * (longest + SAMPLE_LENGTH)
    if tokens > MAX_SAMPLED_TOKENS:
        raise UserError(
            f"eval_prompts: {len(prompts):,} prompts of up to {longest:,} tokens, with {SAMPLE_LENGTH} after each, are "
            f"{tokens:,} tokens, but at most {MAX_SAMPLED_TOKENS:,} are possible; give fewer or shorter prompts"
        )
    return prompts


def print_data(settings: TrainConfig, data: RunData, origin: Origin, print_line: PrintLine) -> None:
    """Prints the data. Warns if a randomly initialized model has a far larger vocabulary than the data."""
    config = settings.data
    if config.use_dummy_dataset:
        print_line("data       made-up tokens, for benchmarks; no validation")
    elif not data.sources:
        print_line(f"data       {config.dataset_path}, which the run makes first")
    else:
        stores = data.sources.values()
        read = ", ".join(f"{store.path} ({store.token_count:,} tokens)" for store in stores)
        validated = ", ".join(str(store.path) for store in data.validation.values()) or "none"
        print_line(f"data       {read}; validation: {validated}")
        known = max(store.vocab_size for store in stores)
        if not origin.setting and 2 * known < settings.model.vocab_size:
            print_line(
                f"warning    the model's vocabulary has {settings.model.vocab_size:,} tokens, but the vocabulary of the data "
                f"has only {known:,}; set vocab_size={known}"
            )
