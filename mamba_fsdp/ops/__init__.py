"""The operators behind the model: a portable PyTorch form and the fused form of each."""
