"""Presents a run to users: terminal output, trackers, the HTML report."""
