"""Uses trained models: loads them, generates text, and evaluates them on data and on the tasks of lm-eval."""
