"""Contains the benchmarks. Each one prints a table. RESULTS.md lists them."""

from mamba_fsdp import interpreter

interpreter.require_packages("numpy", "torch")
