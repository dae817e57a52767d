"""Pretrain Mamba language models with FSDP. README.md says how to use it and what lies where."""
