"""Describes every setting, and resolves what the user writes, with recipes and other launchers' words, to one checked
TrainConfig."""
