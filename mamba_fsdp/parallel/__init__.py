"""Distributes a model over ranks: process groups, sharding, mixed precision, activation checkpointing and context
parallelism. Differences between versions of torch are handled here too."""
