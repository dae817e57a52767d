#!/usr/bin/env python3
"""Converts text to token stores, the input of training.py: `python get_dataset.py [INPUT [OUT]] [--OPTION=VALUE ...]`.
`--help` explains the arguments."""

from mamba_fsdp import interpreter

interpreter.require_packages("fire", "numpy", "tokenizers", "datasets")

from mamba_fsdp import command_line
from mamba_fsdp.verbs import tokenize

if __name__ == "__main__":
    command_line.run(tokenize.main, tokenize.page)
