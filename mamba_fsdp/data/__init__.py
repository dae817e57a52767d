"""The training data: token stores, their tokenizers, the order of samples, and the loader of batches."""
