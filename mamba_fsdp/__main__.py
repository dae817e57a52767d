"""Implements the command `mamba-fsdp VERB`, also available as `python -m mamba_fsdp VERB`, with a module for each verb."""

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

# {verb: description}. Each verb has a module of the same name in mamba_fsdp/verbs. The module of `import` is import_.
VERBS = {
    "tokenize": "convert text to token stores, the input of training",
    "train": "train a model, or resume its training, on one device",
    "generate": "continue a text with a trained model",
    "evaluate": "measure loss, perplexity and bits per byte; run lm-eval tasks",
    "inspect": "describe a run, a checkpoint, data or a file of weights",
    "checkpoints": "list a run's checkpoints, and verify them",
    "replay": "compute a run's steps again, and compare them bit for bit",
    "average": "write the mean of a run's checkpoints as a model",
    "export": "write a model for transformers, for mamba_ssm, or as a .pth file",
    "import": "convert a transformers or state-spaces model to a .pth file",
    "report": "show runs in one HTML file: curves, settings, restarts",
    "plan": "estimate the memory and the time of a training on given machines",
    "preflight": "check the nodes of a job before training (1.train.sbatch calls it)",
    "doctor": "check this machine: packages, GPUs, network, kernels",
}


ELSEWHERE = {  # {name in other programs: verb}
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
    """Returns the help page of a verb. If the verb accepts the settings of a training, --help=all lists them too."""
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
