"""Runs a training from its settings to its last checkpoint: set-up, loop, schedule, optimiser, stopping, metrics."""
