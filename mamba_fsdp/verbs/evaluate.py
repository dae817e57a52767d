"""python -m mamba_fsdp evaluate MODEL DATA [--OPTION=VALUE ...]
python -m mamba_fsdp evaluate MODEL --tasks=NAME,... [--OPTION=VALUE ...]

Measure a model. MODEL is a run folder, a checkpoint, a consolidated.00.pth,
or a transformers or state-spaces folder (docs/evaluating.md).

With DATA: token loss, perplexity per token and per word, and bits per byte.
Every token is predicted once, from the tokens before it in its window. DATA is
a token store, or a folder with stores in validation/ or test/; get_dataset.py
makes stores from text. Under torchrun, the ranks share the work.

With --tasks: what lm-evaluation-harness measures, if lm-eval is installed.
Its results are printed, and kept as lm_eval_TIME.json if MODEL is a run folder.

With --follow: each checkpoint of the run MODEL as it comes, beside its
training, until the run is finished. The numbers are in RUN/evaluations/ and in
the report. After an interruption the same command resumes.
"""

import importlib.util
import sys
import time
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mamba_fsdp.data.store import TokenStore
from mamba_fsdp.errors import UserError, install_command
from mamba_fsdp.fields import condition, setting
from mamba_fsdp.importing.kinds import (
    SPLITS,
    is_store,
    tokenizer_path_in,
    unexpected_data_error,
    unexpected_path_error,
)
from mamba_fsdp.inference.evaluate import EvaluationConfig, measure
from mamba_fsdp.interop.places import check_place
from mamba_fsdp.reporting.console import Console, format_json, print_field
from mamba_fsdp.run.names import CHECKPOINTS, STATUS, TASK_RESULTS
from mamba_fsdp.storage.patience import exists, is_folder, write_for_user

if TYPE_CHECKING:
    from lm_eval.tasks import TaskManager

    from mamba_fsdp.inference.loading import Loaded


# Options that change no number of an evaluation.
NO_NUMBERS = {"batch_size", "follow"}


@condition("--tasks")
def by_tasks(options: "CommandConfig") -> bool:
    return bool(options.tasks)


@condition("a single evaluation (without --follow)")
def once(options: "CommandConfig") -> bool:
    return not options.follow


@dataclass
class CommandConfig(EvaluationConfig):
    """The options of the command besides the model and the data."""

    tasks: list[str] = setting([], elsewhere="task")
    """Tasks and groups of lm-evaluation-harness, as in lambada_openai,hellaswag; lm_eval ls tasks lists them."""
    num_fewshot: int = setting(-1, at_least=-1, needs=by_tasks)
    """Solved questions before each question of a task; -1: the task's own number."""
    include_path: str = setting("", needs=by_tasks, is_path=True)
    """Folder of further task files, your own."""
    tokenizer: str = setting(
        "", needs=by_tasks, is_path=True, elsewhere="tokenizer_path tokenizer_name"
    )
    """Folder of a tokenizer for tasks, if MODEL has none."""
    follow: bool = setting(False)
    """Evaluate each checkpoint of the run MODEL as it comes, until the run is finished."""
    json: bool = setting(False, needs=once)
    """Print the numbers as JSON on stdout, everything else on stderr."""
    model_name: str = setting("", elsewhere="model_variant")
    """MODEL's preset, if there is no config.json next to it."""


def main(model: str, data: str = "", *, options: CommandConfig) -> None:
    if not options.follow:
        check_place(model)
    if bool(data) == bool(options.tasks):
        raise UserError("measure the model with either DATA or --tasks=NAME,...")
    # Both ways import torch; a missing path is reported earlier.
    if options.tasks:
        if importlib.util.find_spec("lm_eval") is None:
            raise UserError(
                f"--tasks needs a package that is not installed: {install_command('lm-eval')}"
            )
    if options.follow:
        follow_run(Path(model), data, options)
    elif options.tasks:
        measure_by_tasks(model, options)
    else:
        measure_by_data(model, data, options)


def measure_by_data(model: str, data: str, options: CommandConfig) -> None:
    """Prints how well the model predicts each store at `data`."""
    stores = stores_in(data, model)
    from mamba_fsdp.inference.loading import inference_world

    world = inference_world()
    stream = sys.stderr if options.json else sys.stdout
    console = Console(enabled=world.rank == 0, stream=stream)
    loaded = load_model(model, options)
    console.print_line(f"model          {model}")
    numbers = {}  # by the name of the store
    for name, store in stores.items():
        evaluation = measure(loaded, store, options, console)
        numbers[name] = asdict(evaluation)
        console.print_line(f"data           {name}")
        console.print_line("\n".join(evaluation.lines()))
    if options.json and world.rank == 0:
        print(format_json({"model": model, "data": numbers}))
    world.close()


def load_model(model: str | Path, options: CommandConfig) -> "Loaded":
    from mamba_fsdp.inference.loading import load

    return load(model, model_name=options.model_name, reset_at_documents=options.reset_at_documents)


def follow_run(run: Path, data: str, options: CommandConfig) -> None:
    """Evaluates each checkpoint of a run as it comes. Raises UserError if `run` is no run, or for several processes."""
    from mamba_fsdp.inference.following import follow
    from mamba_fsdp.inference.loading import inference_world

    if not exists(run / STATUS):  # which a run writes first
        raise unexpected_path_error(run, "a run that has begun")
    if inference_world().size > 1:
        raise UserError("--follow is done by one process; start it without torchrun")
    key = {option: value for option, value in asdict(options).items() if option not in NO_NUMBERS}
    if options.tasks:
        from mamba_fsdp.inference import harness

        name = ",".join(options.tasks)
        manager = harness.find_tasks(options.tasks, options.include_path)
        numbers_of = partial(numbers_by_task, manager, options)
    else:
        name = data.strip("/")
        stores = stores_in(data, str(run))
        numbers_of = partial(numbers_by_store, stores, options)
        key |= {store: TokenStore(path).identity for store, path in stores.items()}
    way = " ".join(f"{part}={value}" for part, value in key.items())
    follow(run, name.replace("/", "_"), way, numbers_of, Console())


def numbers_by_store(
    stores: dict[str, Path], options: CommandConfig, model: Path
) -> dict[str, float]:
    """Returns the numbers of a model over each store, as the records of a run have them."""
    loaded = load_model(model, options)
    numbers = {}
    for name, store in stores.items():
        evaluation = measure(loaded, store, options, Console(enabled=False))
        numbers[f"{name}/loss"] = evaluation.loss
        if evaluation.bits_per_byte is not None:
            numbers[f"{name}/bits_per_byte"] = evaluation.bits_per_byte
    return numbers


def numbers_by_task(
    manager: "TaskManager", options: CommandConfig, model: Path
) -> dict[str, float]:
    """Returns the numbers of a model in each task, as the records of a run have them."""
    _, found = run_tasks(manager, options, str(model))
    numbers = {}
    for task, results in found["results"].items():
        for metric, value in results.items():
            if isinstance(value, float) and "_stderr" not in metric:
                numbers[f"{task}/{metric.removesuffix(',none')}"] = value
    return numbers


def run_tasks(
    manager: "TaskManager", options: CommandConfig, model: str
) -> tuple[Path, dict[str, Any]]:
    """Returns (the path of the model in full, lm-eval's results of it)."""
    from mamba_fsdp.inference import harness

    tested = harness.MambaFSDP(
        model, options.tokenizer, options.seq_length, options.batch_size, options.model_name
    )
    few = options.num_fewshot
    return tested.source, harness.run_tasks(tested, manager, options.tasks, few, options.limit)


def measure_by_tasks(model: str, options: CommandConfig) -> None:
    """Prints lm-eval's tables of the model, and writes its results into the run folder if `model` is one."""
    from lm_eval.utils import make_table

    from mamba_fsdp.inference import harness

    manager = harness.find_tasks(options.tasks, options.include_path)
    source, results = run_tasks(manager, options, model)
    text = format_json({"model": source, **results})
    if options.json:
        print(text)
    else:
        print_field("model", source)
        print(make_table(results))
        if "groups" in results:
            print(make_table(results, "groups"))
    if is_folder(Path(model, CHECKPOINTS)):
        path = Path(model, TASK_RESULTS.format(time.strftime("%Y-%m-%dT%H-%M-%S")))
        write_for_user(path, text)
        print(f"the results are in {path}", file=sys.stderr)


def stores_in(data: str, model: str) -> dict[str, Path]:
    """Returns {name: path} of the token stores at `data`: itself, or its validation and test. Raises UserError if there
    are none; for text, the message has the command that makes a store with the model's tokenizer."""
    stores = {}
    for split in ("", *SPLITS["validation"], *SPLITS["test"]):
        path = Path(data, split)
        if is_store(path):
            stores[f"{data} {split}".strip()] = path
    if not stores:
        options = f" --tokenizer={tokenizer_path_in(model) or 'FOLDER'} --validation_fraction=0"
        raise unexpected_data_error(data, f"{options}; then evaluate OUT/train")
    return stores
