"""Defines the model: one language model of Mamba-1, Mamba-2, Mamba-3, attention and MLP layers."""
