"""What there is to do on a lent GPU: python -m benchmarks.gpu --call 1."""
