"""The verbs of `python -m mamba_fsdp`, one module each: its docstring is its help page, its `main` the verb."""
