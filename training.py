"""Train a Mamba language model: `python training.py [--config=FILE.yaml] [--SETTING=VALUE ...]`, or
the same under torchrun.

Run again after a stop or a crash, it resumes from the newest committed checkpoint. `--help` shows
the usual settings, `--help=all` every one.
"""

import os
import signal

from mamba_fsdp import interpreter

interpreter.need("fire", "numpy", "torch", "yaml")

from mamba_fsdp import command_line
from mamba_fsdp.launch.machine import end_with_launcher
from mamba_fsdp.settings import resolve
from mamba_fsdp.settings.settings_page import settings_page
from mamba_fsdp.verbs.train import prepare, run


def main(*stray, config=None, **given):
    end_with_launcher(signal.SIGKILL)
    settings, explicit = resolve.resolve_settings(given, config, stray)
    try:
        prepare(settings)
    except KeyboardInterrupt:  # what the threads that make data/builtin still compute is of no use
        os._exit(130)
    return run(settings, explicit)


if __name__ == "__main__":
    command_line.run(main, settings_page)
