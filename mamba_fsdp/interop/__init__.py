"""Other people's weights: state-spaces and transformers models in and out, checkpoints of fms-fsdp and Composer in."""
