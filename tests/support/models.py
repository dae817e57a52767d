"""Makes small models of every family for the tests of the model."""

import torch

from mamba_fsdp.model.lm import MambaLM
from mamba_fsdp.ops.backends import REFERENCE
from tests.support.small_models import random_state
from tests.support.tiny import model_config

BACKENDS = {"reference": REFERENCE, "cpp": REFERENCE | {"conv": "cpp", "scan": "cpp"}}
VOCAB_SIZE = 50
SIZES = f"d_model=32 n_layer=3 vocab_size={VOCAB_SIZE}"
ATTENTION = f"n_head=4 d_intermediate=48 {SIZES}"
SETTINGS = {
    "mamba1": f"layers=mamba1 {SIZES}",
    "mamba2": f"layers=mamba2 headdim=16 ngroups=2 {SIZES}",
    "mamba3": f"layers=mamba3+mlp headdim=8 ngroups=2 d_intermediate=48 {SIZES}",
    "gdn": "layers=gdn+mlp,attention+mlp headdim=16 ngroups=2 d_state=12 n_kv_head=2 attention_gate=true qk_norm=head "
    f"norm_position=after_attention {ATTENTION}",
    "hybrid": f"layers=mamba2+mlp,attention+mlp headdim=16 n_kv_head=2 rotary_dim=4 {ATTENTION}",
    "llama": f"layers=attention+mlp n_kv_head=1 tie_embeddings=false {ATTENTION}",
    "hybrids": "layers=mamba2/attention+mlp,mlp,mamba1 headdim=16 d_ssm=48 ssm_norm=none bcdt_norm_eps=1e-6 n_kv_head=2 "
    "rope_scaling=yarn,factor=4,beta_fast=3,beta_slow=1,attention_factor=1.1,original_max_position_embeddings=16 "
    "multipliers=embedding=1.5,residual=0.7,logits=2,ssm_in=1.2,ssm_B=0.5,ssm_out=0.9,attention_k=0.6,mlp_out=0.8 "
    f"mlp_activation=relu2 {ATTENTION}",
    "everything": f"layers=mamba1+mlp,mamba2,attention headdim=16 n_kv_head=4 {ATTENTION}",
}
FAMILIES = {name: model_config(words) for name, words in SETTINGS.items()}


def small_model(family, **more):
    """Returns a small model with random values in all parameters. Values of 0 or 1 could hide that two tensors are
    swapped."""
    model = MambaLM(FAMILIES[family], **more)
    # Not strict, because a tied head is the embedding.
    model.load_state_dict(random_state(model.config), strict=False)
    return model


def some_tokens(batch, length, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCAB_SIZE, (batch, length), generator=generator)
