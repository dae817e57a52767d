"""Compiles our Triton kernels, as real models launch them, for GPUs that need not be here."""
