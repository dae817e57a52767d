"""Reads and writes files on unreliable storage (retry.py), and untrusted files: typed JSON, YAML with text values, formats
and versions."""
