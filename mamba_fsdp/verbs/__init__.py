"""The verbs of `python -m mamba_fsdp`, one module each: the docstring is the help page, `main` runs the verb."""
