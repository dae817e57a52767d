"""Measures what a lent GPU can show: python -m benchmarks.gpu --call A."""
