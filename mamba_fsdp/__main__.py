"""The verbs beside training.py and get_dataset.py: `python -m mamba_fsdp VERB ...`. --help after a verb explains it."""

import importlib
import sys

from mamba_fsdp import interpreter

interpreter.need("fire", "numpy", "torch", "yaml")

from config.fields import near_name
from mamba_fsdp import command_line

VERBS = {  # name: (module in mamba_fsdp/verbs, what it does)
    "generate": ("generate", "continue a text with a trained model"),
    "evaluate": ("evaluate", "loss, perplexity and bits per byte over a token store or other data"),
    "inspect": (
        "inspect",
        "say what a run, a checkpoint, data of any format or a weights file holds",
    ),
    "checkpoints": ("checkpoints", "list a run's checkpoints, and verify them"),
    "export": ("export", "write a model for transformers or mamba_ssm, or as consolidated.00.pth"),
    "import": ("import_", "bring a transformers or state-spaces model to consolidated.00.pth"),
    "report": ("report", "show runs in one HTML file: curves, settings, restarts, samples"),
    "plan": ("plan", "say whether a training fits on machines, how long it takes, what it costs"),
    "preflight": ("preflight", "check a cluster's nodes before training (1.train.sbatch calls it)"),
    "doctor": ("doctor", "say what this machine, or every node, has, and whether it works"),
}


def main() -> None:
    if len(sys.argv) < 2 or sys.argv[1] in ("--help", "-h", "help"):
        print("python -m mamba_fsdp VERB ...  (--help after a verb lists its options; --version)\n")
        for verb, (_, meaning) in VERBS.items():
            print(f"  {verb:<11} {meaning}")
        raise SystemExit(0)
    if sys.argv[1] == "--version":
        return print(command_line.VERSION)
    verb, arguments = sys.argv[1], sys.argv[2:]
    if verb not in VERBS:
        print(
            f"error: there is no verb {verb!r}; {near_name(verb, VERBS, 'choose one of ' + ', '.join(VERBS))}",
            file=sys.stderr,
        )
        raise SystemExit(2)
    module = importlib.import_module(f"mamba_fsdp.verbs.{VERBS[verb][0]}")
    command_line.run(module.main, lambda: str(module.__doc__).strip(), arguments)


if __name__ == "__main__":
    main()
