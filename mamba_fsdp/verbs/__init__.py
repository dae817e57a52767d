"""The verbs of `python -m mamba_fsdp`. Each is a module: its docstring begins the help page, and its `main` runs the verb."""
