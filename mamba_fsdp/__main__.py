"""Runs the command mamba-fsdp: `python -m mamba_fsdp VERB ...` is the same. --help after a verb explains it."""

import importlib
import inspect
import sys
from types import ModuleType
from typing import NoReturn

from mamba_fsdp import interpreter

interpreter.require_packages("fire", "numpy", "torch", "yaml")

from mamba_fsdp import command_line
from mamba_fsdp.errors import UserError
from mamba_fsdp.settings import other_launchers
from mamba_fsdp.settings.help import Page, field_docs, help_query
from mamba_fsdp.settings.train_config import SECTIONS
from mamba_fsdp.text import suggest_name

VERBS = {  # name: what it does. The module in mamba_fsdp/verbs has that name; import's is import_
    "tokenize": "text in, token stores out: what training reads",
    "train": "train a model, or resume its training, on one device",
    "generate": "continue a text with a trained model",
    "evaluate": "loss, perplexity and bits per byte of text; the tasks of lm-eval",
    "inspect": "say what a run, a checkpoint, data or a weights file holds",
    "checkpoints": "list a run's checkpoints, and verify them",
    "replay": "compute a run's steps again, and compare them bit for bit",
    "average": "write the mean of a run's checkpoints as a model",
    "export": "write a model for transformers, for mamba_ssm, or as a .pth file",
    "import": "bring a transformers or state-spaces model to consolidated.00.pth",
    "report": "show runs in one HTML file: curves, settings, restarts",
    "plan": "say whether a training fits on machines, and how long it takes",
    "preflight": "check a cluster's nodes before training (1.train.sbatch calls it)",
    "doctor": "say what this machine has and whether it works",
}


ELSEWHERE = {  # what others call these, and what training is started with
    "sample": "generate",
    "eval": "evaluate",
    "convert": "import",
    "info": "inspect",
}


OVERVIEW = """
mamba-fsdp VERB ...      or: python -m mamba_fsdp VERB ...

  {verbs}

VERB --help lists a verb's options, VERB --help=WORD the ones about a word.
Training on all devices of a machine or a cluster: ./1.train.sbatch --help.
Completion for bash: source mamba_fsdp/launch/completion.bash
"""


def main() -> None:
    args = sys.argv[1:] or ["--help"]
    if args[0] == "help":
        args[0] = "--help"
    asked = help_query(args[:2])
    if asked in VERBS and args[0] not in VERBS:
        args = [asked, "--help"]
    verb, *arguments = args
    if verb in VERBS:
        name = verb.replace("import", "import_")
        module = importlib.import_module(f"mamba_fsdp.verbs.{name}")
        command_line.run(module.main, lambda: page_of(module), arguments)
    else:
        command_line.run(refuse, overview, [verb])


def refuse(verb: str) -> NoReturn:
    hint = suggest_name(verb, VERBS, f"choose one of {', '.join(VERBS)}", elsewhere=ELSEWHERE)
    raise UserError(f"there is no verb {verb!r}; {hint}")


def overview() -> Page:
    verbs = [f"{name:<11} {meaning}" for name, meaning in VERBS.items()]
    return Page(OVERVIEW.format(verbs="\n  ".join(verbs)), {})


def page_of(module: ModuleType) -> Page:
    """Returns the help page of a verb. If it takes the settings of training too, --help=all has them."""
    if hasattr(module, "page"):
        return module.page()
    options = command_line.options_class(module.main)
    page = Page(str(module.__doc__), {"": options} if options else {})
    if options and "settings_by_name" in inspect.signature(module.main).parameters:
        page.usual = field_docs(options)
        page.sections |= SECTIONS
        page.load_entries = other_launchers.load_entries
    return page


if __name__ == "__main__":
    main()
