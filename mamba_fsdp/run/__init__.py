"""Keeps the run folder: the names in it, its layout, the lease that says which process may write there, and the run's
records."""
