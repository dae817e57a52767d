"""Contains a module for each verb of `python -m mamba_fsdp`. The docstring of the module is the beginning of the verb's help
page, and the function `main` of the module runs the verb."""
