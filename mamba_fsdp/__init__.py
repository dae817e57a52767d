"""Pretrain Mamba language models with FSDP. README.md says how to use it; docs/layout.md what lies where."""
