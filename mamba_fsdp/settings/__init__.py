"""Every setting, its presets and recipes, and the words of other launchers; resolved to one checked TrainConfig."""
