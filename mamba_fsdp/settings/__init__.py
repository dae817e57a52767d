"""Every setting, presets and recipes, the words of other launchers, and their resolution to one checked TrainConfig."""
