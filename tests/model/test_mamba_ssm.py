"""The model beside mamba-ssm's own MambaLMHeadModel, which runs its reference functions in a process of its own."""

import io
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from config.model_config import ModelConfig
from mamba_fsdp.model.lm import MambaLM
from tests.support.mamba_ssm_install import mamba_ssm_folder
from tests.support.models import filled

ORACLES = Path(__file__).resolve().parent.parent / "support"

pytestmark = [pytest.mark.slow, pytest.mark.torch22]

MAMBA2 = dict(layer="Mamba2", use_mem_eff_path=False)
MODELS = {  # our fields, theirs
    "mamba1": (
        dict(layers="mamba1", n_layer=2, tie_embeddings=False),
        dict(ssm_cfg={"layer": "Mamba1"}),
    ),
    "mamba2": (
        dict(layers="mamba2", n_layer=2, d_state=64, headdim=32),
        dict(ssm_cfg=dict(d_state=64, headdim=32, **MAMBA2)),
    ),
    "mamba2-groups": (
        dict(layers="mamba2", n_layer=2, d_state=16, headdim=16, ngroups=3),
        dict(ssm_cfg=dict(d_state=16, headdim=16, ngroups=3, **MAMBA2)),
    ),
    "hybrid": (
        dict(
            layers="mamba2+mlp,attention+mlp",
            n_layer=4,
            d_state=128,
            headdim=32,
            d_intermediate=128,
            n_head=4,
            n_kv_head=2,
            head_dim=12,
            rotary_dim=0,
        ),
        dict(
            ssm_cfg=dict(d_state=128, headdim=32, **MAMBA2),
            attn_layer_idx=[1, 3, 5, 7],
            d_intermediate=128,
            attn_cfg=dict(
                num_heads=4,
                num_heads_kv=2,
                head_dim=12,
                causal=True,
                qkv_proj_bias=False,
                out_proj_bias=False,
            ),
        ),
    ),
}  # rotary positions need flash-attn there
SHARED = dict(d_model=48, vocab_size=61, pad_vocab_size_multiple=16)


def ask(config, theirs, state, tokens):
    request = io.BytesIO()
    fields = dict(**SHARED, n_layer=config.n_layer, tie_embeddings=config.tie_embeddings, **theirs)
    torch.save({"config": fields, "state": state, "tokens": tokens}, request)
    command = [sys.executable, ORACLES / "mamba_ssm_oracle.py", mamba_ssm_folder()]
    done = subprocess.run(command, input=request.getvalue(), capture_output=True)
    assert done.returncode == 0, done.stderr.decode()
    return torch.load(io.BytesIO(done.stdout), weights_only=True)


@pytest.mark.parametrize("name", MODELS)
def test_the_reference_gives_the_same_logits_loss_and_gradients_from_our_weights(name):
    """Their model takes our state dict as it is: the names are the same."""
    ours, theirs = MODELS[name]
    config = ModelConfig(**SHARED, **ours)
    model = filled(MambaLM(config))
    tokens = torch.randint(0, 61, (2, 45), generator=torch.Generator().manual_seed(0))
    answer = ask(config, theirs, model.state_dict(), tokens)

    torch.testing.assert_close(model(tokens), answer["logits"], rtol=1e-4, atol=1e-5)
    loss = model(tokens[:, :-1], labels=tokens[:, 1:]) / tokens[:, 1:].numel()
    torch.testing.assert_close(loss, answer["loss"], rtol=1e-5, atol=0)
    loss.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert gradients.keys() == answer["gradients"].keys()
    for name, expected in answer["gradients"].items():
        atol = 1e-4 * expected.abs().max().item()
        torch.testing.assert_close(gradients[name], expected, rtol=1e-3, atol=atol, msg=name)
