"""The Python interface of trained models: load, generate, evaluate, answer lm-eval's tasks."""
