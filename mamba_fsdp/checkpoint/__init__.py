"""Saving, committing, choosing, pruning, loading and consolidating checkpoints."""
