"""Side by side with peers, in one run: each benchmark prints a table. README.md lists them."""

from mamba_fsdp import interpreter

interpreter.need("numpy", "torch")
