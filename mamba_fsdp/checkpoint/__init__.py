"""Saves, commits, chooses, prunes, and loads checkpoints."""
