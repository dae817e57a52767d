"""Trains a Mamba language model: `python training.py [--config=FILE.yaml] [--SETTING=VALUE ...]`, or
the same under torchrun.

After a stop or a crash, the same command resumes from the newest committed checkpoint. `--help`
lists the most common settings, and `--help=all` lists all settings.
"""

from mamba_fsdp import interpreter

interpreter.require_packages("fire", "numpy", "torch", "yaml")

from mamba_fsdp import command_line
from mamba_fsdp.verbs import train

if __name__ == "__main__":
    command_line.run(train.main, train.page)
