"""Measures this project on a GPU: python -m benchmarks.gpu --call A."""
