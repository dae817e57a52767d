"""Saves, commits, selects, loads, and removes checkpoints."""
