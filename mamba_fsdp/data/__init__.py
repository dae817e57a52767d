"""Reads token stores as batches: stores, their tokenizers, the order of samples, the loader."""
