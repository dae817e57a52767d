"""Runs a training from its settings to its last checkpoint: setup, loop, schedule, optimizer, stopping, metrics."""
