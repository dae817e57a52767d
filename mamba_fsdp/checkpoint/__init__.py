"""Saving, committing, choosing, pruning, and loading checkpoints."""
