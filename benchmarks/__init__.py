"""Compares this project with peers, in one run: each benchmark prints a table. RESULTS.md lists them."""

from mamba_fsdp import interpreter

interpreter.require_packages("numpy", "torch")
