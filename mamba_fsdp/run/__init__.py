"""Manages the run folder: file names, layout, the lease that lets one process write at a time, and the run's
records."""
