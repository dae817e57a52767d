"""python -m mamba_fsdp evaluate MODEL DATA [--OPTION=VALUE ...]
python -m mamba_fsdp evaluate MODEL --tasks=NAME,... [--OPTION=VALUE ...]

Evaluate a model. MODEL is a run folder, a checkpoint, a consolidated.00.pth,
or a transformers or state-spaces folder (docs/evaluating.md).

With DATA, it prints the loss per token, the perplexity per token and per word,
and the bits per byte. Every token is predicted once, from the tokens before it
in its window. DATA is a token store, or a folder with stores in validation/ or
test/; get_dataset.py makes stores from text. Under torchrun, the ranks share
the work.

With --tasks, it runs tasks of lm-evaluation-harness; lm-eval must be installed.
The results are printed. If MODEL is a run folder, they are also written there
as lm_eval_TIME.json.

With --follow, it evaluates each new checkpoint of the run MODEL while the run
trains, until the run is finished. The results are in RUN/evaluations/ and in
the report. After an interruption, the same command resumes.
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
from mamba_fsdp.interop.places import check_model_path
from mamba_fsdp.reporting.console import Console, format_json, print_field
from mamba_fsdp.run.names import CHECKPOINTS, STATUS, TASK_RESULTS
from mamba_fsdp.storage.retry import exists, is_folder, write_for_user

if TYPE_CHECKING:
    from lm_eval.tasks import TaskManager

    from mamba_fsdp.inference.loading import Loaded


# Options that do not change the results of an evaluation.
NEUTRAL_OPTIONS = {"batch_size", "follow"}


@condition("--tasks")
def uses_tasks(options: "CommandConfig") -> bool:
    return bool(options.tasks)


@condition("a single evaluation (without --follow)")
def evaluates_once(options: "CommandConfig") -> bool:
    return not options.follow


@dataclass
class CommandConfig(EvaluationConfig):
    """The options of the command, in addition to the model and the data."""

    tasks: list[str] = setting([], elsewhere="task")
    """Tasks and groups of lm-evaluation-harness, for example lambada_openai,hellaswag. The command lm_eval ls tasks lists
    them."""
    num_fewshot: int = setting(-1, at_least=-1, needs=uses_tasks)
    """Number of few-shot examples before each question of a task. -1: the number that the task defines."""
    include_path: str = setting("", needs=uses_tasks, is_path=True)
    """Folder with your own task files."""
    tokenizer: str = setting(
        "", needs=uses_tasks, is_path=True, elsewhere="tokenizer_path tokenizer_name"
    )
    """Folder of a tokenizer for the tasks, if MODEL has none."""
    follow: bool = setting(False)
    """Evaluate each new checkpoint of the run MODEL until the run is finished."""
    json: bool = setting(False, needs=evaluates_once)
    """Print the results as JSON on stdout, and everything else on stderr."""
    model_name: str = setting("", elsewhere="model_variant")
    """Preset of MODEL, if there is no config.json next to it."""


def main(model: str, data: str = "", *, options: CommandConfig) -> None:
    if not options.follow:
        check_model_path(model)
    if bool(data) == bool(options.tasks):
        raise UserError("evaluate: give either DATA or --tasks=NAME,...")
    # Importing torch takes seconds; mistakes in the arguments are reported before.
    if options.tasks and importlib.util.find_spec("lm_eval") is None:
        raise UserError(
            f"--tasks needs a package that is not installed: {install_command('lm-eval')}"
        )
    if options.follow:
        follow_run(Path(model), data, options)
    elif options.tasks:
        evaluate_tasks(model, options)
    else:
        evaluate_stores(model, data, options)


def evaluate_stores(model: str, data: str, options: CommandConfig) -> None:
    """Evaluates the model on each token store at `data`, and prints the results."""
    stores = find_stores(data, model)
    from mamba_fsdp.inference.loading import inference_world

    world = inference_world()
    stream = sys.stderr if options.json else sys.stdout
    console = Console(enabled=world.rank == 0, stream=stream)
    loaded = load_model(model, options)
    console.print_line(f"model          {model}")
    numbers = {}  # {name of the store: results}
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
    """Evaluates each new checkpoint of a run until the run is finished. Raises UserError if `run` is not a run that has
    started, or if there are several processes."""
    from mamba_fsdp.inference.following import follow
    from mamba_fsdp.inference.loading import inference_world

    if not exists(run / STATUS):  # the first file that a run writes
        raise unexpected_path_error(run, "a run that has begun")
    if inference_world().size > 1:
        raise UserError("--follow needs a single process; start it without torchrun")
    key = {
        option: value for option, value in asdict(options).items() if option not in NEUTRAL_OPTIONS
    }
    if options.tasks:
        from mamba_fsdp.inference import harness

        name = ",".join(options.tasks)
        manager = harness.find_tasks(options.tasks, options.include_path)
        evaluate_model = partial(task_results, manager, options)
    else:
        name = data.strip("/")
        stores = find_stores(data, str(run))
        evaluate_model = partial(store_results, stores, options)
        key |= {store: TokenStore(path).identity for store, path in stores.items()}
    way = " ".join(f"{part}={value}" for part, value in key.items())
    follow(run, name.replace("/", "_"), way, evaluate_model, Console())


def store_results(stores: dict[str, Path], options: CommandConfig, model: Path) -> dict[str, float]:
    """Evaluates a model on each store. Returns {"STORE/METRIC": value}, the format of the records in RUN/evaluations/."""
    loaded = load_model(model, options)
    numbers = {}
    for name, store in stores.items():
        evaluation = measure(loaded, store, options, Console(enabled=False))
        numbers[f"{name}/loss"] = evaluation.loss
        if evaluation.bits_per_byte is not None:
            numbers[f"{name}/bits_per_byte"] = evaluation.bits_per_byte
    return numbers


def task_results(manager: "TaskManager", options: CommandConfig, model: Path) -> dict[str, float]:
    """Evaluates a model on each task. Returns {"TASK/METRIC": value}, the format of the records in RUN/evaluations/."""
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
    """Runs lm-eval's tasks. Returns (path of the weights, results of lm-eval)."""
    from mamba_fsdp.inference import harness

    tested = harness.MambaFSDP(
        model, options.tokenizer, options.seq_length, options.batch_size, options.model_name
    )
    few = options.num_fewshot
    return tested.source, harness.run_tasks(tested, manager, options.tasks, few, options.limit)


def evaluate_tasks(model: str, options: CommandConfig) -> None:
    """Runs lm-eval's tasks and prints the tables of results. If `model` is a run folder, also writes the results there."""
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


def find_stores(data: str, model: str) -> dict[str, Path]:
    """Finds the token stores at `data`: the folder itself, or its subfolders for validation and test.

    Returns {name: path}. Raises UserError if there are none. If `data` is text, the message contains the command that makes
    a store of it with the model's tokenizer."""
    stores = {}
    for split in ("", *SPLITS["validation"], *SPLITS["test"]):
        path = Path(data, split)
        if is_store(path):
            stores[f"{data} {split}".strip()] = path
    if not stores:
        options = f" --tokenizer={tokenizer_path_in(model) or 'FOLDER'} --validation_fraction=0"
        raise unexpected_data_error(data, f"{options}; then evaluate OUT/train")
    return stores
