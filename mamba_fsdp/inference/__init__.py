"""Offers trained models to Python: load, generate, evaluate, run lm-eval's tasks."""
