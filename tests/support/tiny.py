"""Provides the settings of a run that takes a second, and parses settings."""

from mamba_fsdp.settings.resolve import resolve_settings

TINY = {
    "d_model": 16,
    "n_layer": 2,
    "vocab_size": 64,
    "d_state": 4,
    "seq_length": 32,
    "batch_size": 2,
    "num_steps": 6,
    "mixed_precision": "fp32",
    "learning_rate": 0.01,
    "eval_interval": 3,
    "eval_batches": 2,
    "report_interval": 1,
    "checkpoint_interval": 2,
    "kernels": "reference",
}

# A hybrid with layers of all families whose sequences can be divided among ranks.
HYBRID = {
    "layers": "mamba1,mamba2/attention+mlp,mlp,mamba3+mlp",
    "n_layer": 4,
    "d_ssm": 24,
    "headdim": 8,
    "bcdt_norm_eps": 1e-6,
    "ssm_norm": "before",
    "n_head": 2,
    "n_kv_head": 1,
    "attention_gate": True,
    "qk_norm": "whole",
    "norm_position": "after_attention",
    "rope_scaling": "yarn,factor=4,beta_fast=3,beta_slow=1,attention_factor=1.1,original_max_position_embeddings=16",
    "d_intermediate": 24,
    "mlp_activation": "relu2",
    "multipliers": "embedding=3,residual=0.7,logits=2,ssm_in=1.2,ssm_B=0.5,attention_out=0.8,attention_k=0.6,mlp_out=0.9",
    "reset_at_documents": True,
}


def format_arguments(settings):
    """Returns settings as command-line arguments."""
    return [f"--{name}={value}" for name, value in settings.items()]


def resolved(file=None, **given):
    """Returns the resolved settings of a run. The keyword arguments are settings as a user writes them."""
    words = {name: str(value) for name, value in given.items()}
    return resolve_settings(words, file)


def model_config(text):
    """Returns the ModelConfig of settings in the notation `name=value name=value`."""
    return resolve_settings(dict(word.split("=", 1) for word in text.split())).model
