"""The verbs beside training.py and get_dataset.py: `python -m mamba_fsdp VERB ...`. --help after a
verb explains it."""

import importlib
import sys

from mamba_fsdp import interpreter

interpreter.need("fire", "numpy", "torch", "yaml")

from config.fields import near_name
from mamba_fsdp import command_line

VERBS = {  # name: what it does. The module in mamba_fsdp/verbs has that name; import's is import_
    "generate": "continue a text with a trained model",
    "evaluate": "loss, perplexity and bits per byte over a token store",
    "inspect": "say what a run, a checkpoint, data of any format or a weights file holds",
    "checkpoints": "list a run's checkpoints, and verify them",
    "export": "write a model for transformers or mamba_ssm, or as consolidated.00.pth",
    "import": "bring a transformers or state-spaces model to consolidated.00.pth",
    "report": "show runs in one HTML file: curves, settings, restarts",
    "plan": "say whether a training fits on machines, and how long it takes",
    "preflight": "check a cluster's nodes before training (1.train.sbatch calls it)",
    "doctor": "say what this machine has and whether it works",
}


def main() -> None:
    verb, *arguments = sys.argv[1:] or ["--help"]
    if verb in ("--help", "-h", "help"):
        print("python -m mamba_fsdp VERB ...  (--help after a verb lists its options; --version)\n")
        for name, meaning in VERBS.items():
            print(f"  {name:<11} {meaning}")
    elif verb == "--version":
        print(command_line.VERSION)
    elif verb not in VERBS:
        hint = near_name(verb, VERBS, f"choose one of {', '.join(VERBS)}")
        print(f"error: there is no verb {verb!r}; {hint}", file=sys.stderr)
        raise SystemExit(2)
    else:
        name = verb.replace("import", "import_")
        module = importlib.import_module(f"mamba_fsdp.verbs.{name}")
        command_line.run(module.main, lambda: str(module.__doc__).strip(), arguments)


if __name__ == "__main__":
    main()
