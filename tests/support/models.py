"""Small models of every family for the tests of the model."""

import torch

from mamba_fsdp.model.init import initial_part
from mamba_fsdp.model.lm import MambaLM
from mamba_fsdp.model.spec import parameters
from mamba_fsdp.ops.backends import REFERENCE
from mamba_fsdp.settings.model_config import ModelConfig

BACKENDS = {"reference": REFERENCE, "cpp": REFERENCE | {"conv": "cpp", "scan": "cpp"}}
SIZES = dict(d_model=32, n_layer=3, vocab_size=50)
ATTENTION = dict(n_head=4, d_intermediate=48)
FAMILIES = {
    "mamba1": ModelConfig(layers="mamba1", **SIZES),
    "mamba2": ModelConfig(layers="mamba2", headdim=16, ngroups=2, **SIZES),
    "mamba3": ModelConfig(layers="mamba3+mlp", headdim=8, ngroups=2, d_intermediate=48, **SIZES),
    "hybrid": ModelConfig(
        layers="mamba2+mlp,attention+mlp",
        headdim=16,
        n_kv_head=2,
        rotary_dim=4,
        **ATTENTION,
        **SIZES,
    ),
    "llama": ModelConfig(
        layers="attention+mlp", n_kv_head=1, tie_embeddings=False, **ATTENTION, **SIZES
    ),
    "hybrids": ModelConfig(
        layers="mamba2/attention+mlp,mlp,mamba1",
        headdim=16,
        d_ssm=48,
        ssm_norm="none",
        bcdt_norm_eps=1e-6,
        n_kv_head=2,
        rope_scaling="yarn,factor=4,beta_fast=3,beta_slow=1,attention_factor=1.1,original_max_position_embeddings=16",
        mlp_activation="relu2",
        multipliers="embedding=1.5,residual=0.7,logits=2,ssm_in=1.2,ssm_B=0.5,ssm_out=0.9,attention_k=0.6,mlp_out=0.8",
        **ATTENTION,
        **SIZES,
    ),
    "everything": ModelConfig(
        layers="mamba1+mlp,mamba2,attention", headdim=16, n_kv_head=4, **ATTENTION, **SIZES
    ),
}


def small_model(family, **more):
    """With initial values, disturbed so that nothing is left at 0 or 1 and hides a mix-up."""
    model = MambaLM(FAMILIES[family], **more)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            described = parameters(model.config)[name]
            value = initial_part(name, described, 1, 0, described.size).view(described.shape)
            value *= (
                3 if "embedding" in name else 1 + 0.3 * torch.rand(value.shape, generator=generator)
            )
            parameter.copy_(value)
    return model


def some_tokens(batch, length, seed=0):
    return torch.randint(
        0, SIZES["vocab_size"], (batch, length), generator=torch.Generator().manual_seed(seed)
    )
