"""Reads and writes files on unreliable storage (patience.py), and files that we can't trust: typed JSON, YAML of texts,
formats and versions."""
