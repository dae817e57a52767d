"""Defines the language model and its layers: Mamba-1, Mamba-2, Mamba-3, Gated DeltaNet, attention and MLP layers."""
