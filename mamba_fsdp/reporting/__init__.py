"""Shows a run to people: the terminal, trackers, the HTML report."""
