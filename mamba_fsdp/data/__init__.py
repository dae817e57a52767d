"""From text to batches: tokenising, token stores, the order of samples, the loader."""
