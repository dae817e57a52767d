"""Defines the operators of the model: what each computes (formula, source, shapes), and its backends (see
backends.py)."""
