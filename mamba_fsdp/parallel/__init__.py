"""Spreads a model over ranks: process groups, sharding, precision, activation checkpointing, sequences that ranks
share, and the differences between versions of torch."""
