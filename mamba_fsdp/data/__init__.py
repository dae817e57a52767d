"""Turns text into batches: tokenising, token stores, the order of samples, the loader."""
