"""What there is to measure on a GPU: python -m benchmarks.gpu --all."""
