"""Every setting, tables of models and of other launchers' words, and ready runs as YAML files."""
