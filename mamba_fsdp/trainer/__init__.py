"""A training from its settings to its last checkpoint: the set-up, the loop, schedule, optimiser, stopping, metrics."""
