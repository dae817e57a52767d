"""Makes random small models of every family, in each file format, for the tests of interop."""

import dataclasses
import json

import torch

from mamba_fsdp.model.init import initial_values
from mamba_fsdp.model.lm import MambaLM
from mamba_fsdp.model.spec import parameters
from tests.support.tiny import model_config

# Unusual settings: sizes that are not multiples of anything, tied weights, padding, ratios of heads, partial rotary
# positions, and state sizes.
SETTINGS = {
    "mamba1": "layers=mamba1 d_model=24 n_layer=3 vocab_size=53 d_state=5 d_conv=3",
    "mamba1-untied-rank": "layers=mamba1 d_model=40 n_layer=2 vocab_size=64 dt_rank=7 expand=3 tie_embeddings=false",
    "mamba2": "layers=mamba2 d_model=32 n_layer=3 vocab_size=50 pad_vocab_size_multiple=16 d_state=64 headdim=32",
    "mamba2-untied-wide": "layers=mamba2 d_model=48 n_layer=2 vocab_size=61 pad_vocab_size_multiple=1 d_state=128 "
    "headdim=16 chunk_size=8 tie_embeddings=false norm_eps=1e-5",
    "hybrid": "layers=2*mamba2+mlp,attention+mlp,mamba2+mlp d_model=32 n_layer=4 vocab_size=61 d_state=16 headdim=16 "
    "n_head=4 n_kv_head=2 rotary_dim=4 d_intermediate=128 tie_embeddings=false",
    "hybrid-odd-heads": "layers=attention+mlp,mamba2+mlp d_model=48 n_layer=3 vocab_size=40 d_state=64 headdim=32 "
    "n_head=6 n_kv_head=1 head_dim=20 rotary_dim=14 rope_theta=5e5 d_intermediate=256",
    "llama": "layers=attention+mlp d_model=32 n_layer=2 vocab_size=47 pad_vocab_size_multiple=1 n_head=4 n_kv_head=4 "
    "d_intermediate=128 tie_embeddings=false",
    "llama-grouped": "layers=attention+mlp d_model=48 n_layer=3 vocab_size=50 n_head=6 n_kv_head=3 head_dim=12 "
    "d_intermediate=384 rope_theta=1e6",
}
CONFIGS = {name: model_config(words) for name, words in SETTINGS.items()}
# transformers 5 and newer support groups.
GROUPED = model_config(
    "layers=mamba2 d_model=32 n_layer=2 vocab_size=50 d_state=16 headdim=16 ngroups=2"
)
# No version of transformers supports Mamba-3.
MAMBA3 = model_config(
    "layers=mamba3+mlp d_model=32 n_layer=2 vocab_size=50 pad_vocab_size_multiple=16 d_state=24 headdim=16 ngroups=2 "
    "d_intermediate=128 decay_activation=softplus"
)


# The config.json of Bamba-9B, in the format of state-spaces.
BAMBA = {
    "d_model": 4096,
    "d_intermediate": 14336,
    "n_layer": 32,
    "vocab_size": 128256,
    "ssm_cfg": {"layer": "Mamba2"},
    "attn_layer_idx": [9, 18, 27],
    "rms_norm": True,
    "residual_in_fp32": True,
    "fused_add_norm": True,
    "pad_vocab_size_multiple": 16,
    "tie_embeddings": False,
    "attn_cfg": {
        "causal": True,
        "d_conv": 0,
        "head_dim": 128,
        "num_heads": 32,
        "num_heads_kv": 8,
        "out_proj_bias": False,
        "qkv_proj_bias": False,
        "rotary_emb_dim": 64,
    },
}


def random_state(config, seed=0):
    """Returns {name: tensor} with the initial values of a model plus random changes. Without the changes, tensors with
    equal values, such as ones, could hide that two tensors are swapped."""
    model = MambaLM(config)
    generator = torch.Generator().manual_seed(seed)
    state = {}
    for name, _ in model.named_parameters():
        described = parameters(config)[name]
        value = initial_values(name, described, seed, 0, described.size).view(described.shape)
        value = value * (1 + 0.3 * torch.rand(value.shape, generator=generator))
        state[name] = value + 0.03 * torch.randn(value.shape, generator=generator)
    return state


def model_of(config, get, dtype=torch.float32):
    """Returns our MambaLM with the weights get(name)."""
    model = MambaLM(config, compute_dtype=dtype).to(dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(get(name))
    return model


def write_ours(folder, config, state=None):
    """Writes a model folder in our format, without the library's code that writes models. state: {name: tensor} of the
    model, by default random_state(config)."""
    state = state or random_state(config)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(dataclasses.asdict(config)))
    tied = {"lm_head.weight": state["backbone.embedding.weight"]} if config.tie_embeddings else {}
    torch.save({**state, **tied}, folder / "consolidated.00.pth")
    return folder


def write_tokenizer(folder):
    """Writes a byte-level tokenizer with an end-of-text token, in the format of transformers."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())[:38]
    tokenizer = Tokenizer(
        models.BPE(
            vocab={"<|endoftext|>": 0, **{letter: i + 1 for i, letter in enumerate(letters)}},
            merges=[],
        )
    )
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(), decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|endoftext|>").save_pretrained(
        folder
    )
    return folder


def assert_same(weights, config, state):
    """Asserts that the Weights are bitwise equal to these tensors, and that the config describes the same model."""
    assert weights.shapes.keys() == state.keys()
    for name, tensor in state.items():
        found = weights.get(name)
        assert found.dtype == tensor.dtype and torch.equal(found, tensor), name
    assert weights.config.structure() == config.structure()
