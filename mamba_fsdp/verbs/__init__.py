"""Holds the verbs of `python -m mamba_fsdp`, a module each: the docstring opens the help page, `main` runs the verb."""
