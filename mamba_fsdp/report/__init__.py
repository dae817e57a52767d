"""Progress, tables and metrics, for people to look at."""
