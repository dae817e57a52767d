"""What a GPU has to show: training steps beside others' (models.py), and all else in one call (all.py)."""
