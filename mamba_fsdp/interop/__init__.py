"""Reads and writes others' weights: state-spaces and transformers models in and out, fms-fsdp's and Composer's in."""
