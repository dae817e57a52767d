"""Weights in third-party formats. Models of state-spaces and transformers are read and written; checkpoints of fms-fsdp and
Composer are read."""
