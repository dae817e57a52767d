"""Compiles our Triton kernels, with the arguments of real models, for GPUs that this machine need not have."""
