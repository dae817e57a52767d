"""The settings of a training run: their description, and the code that resolves them to one validated TrainConfig from the
command line, a YAML file, recipes, and the option names of other launchers."""
