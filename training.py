"""Train a Mamba language model: `python training.py [--config=FILE.yaml] [--SETTING=VALUE ...]`, or
the same under torchrun.

Run again after a stop or a crash, it resumes from the newest committed checkpoint. `--help` lists
every setting.
"""

import os
import signal

from mamba_fsdp import interpreter

interpreter.need("fire", "numpy", "torch", "yaml")

from config import resolve
from mamba_fsdp import command_line
from mamba_fsdp.data.builtin import make_missing_builtin
from mamba_fsdp.launch.machine import end_with_launcher


def main(*stray, config=None, **given):
    end_with_launcher(signal.SIGKILL)
    settings, explicit = resolve.resolve_settings(given, config, stray)
    # These import torch, which takes seconds: only when there is something to train.
    from mamba_fsdp.interop.convert import publish
    from mamba_fsdp.train.run import run_training
    from mamba_fsdp.verbs.loading import starting_weights

    weights = starting_weights(settings, explicit)
    if not settings.training.dry_run and os.environ.get("RANK", "0") == "0":
        make_missing_builtin(settings.data)  # where the ranks meet, the others wait
    return run_training(settings, weights, write_model=publish)


if __name__ == "__main__":
    command_line.run(main, resolve.help_page)
