"""The published models by name: what differs from ModelConfig's defaults.

Sources: the releases of state-spaces (mamba, mamba2), Bamba, mambaoutai and Llama; the smaller llama2 and llama3 are
those of fms-fsdp.
"""

import difflib

from config.model_config import ModelConfig
from mamba_fsdp.errors import UserError


def _mamba(d_model, n_layer):
    return dict(layers="mamba1", d_model=d_model, n_layer=n_layer, vocab_size=50277)


def _mamba2(d_model, n_layer):
    return dict(
        layers="mamba2",
        d_model=d_model,
        n_layer=n_layer,
        d_state=128,
        vocab_size=50277,
        pad_vocab_size_multiple=16,
    )


def _llama(d_model, n_head, n_kv_head, n_layer, d_intermediate, vocab_size=32000, rope_theta=1e4):
    return dict(
        layers="attention+mlp",
        d_model=d_model,
        n_head=n_head,
        n_kv_head=n_kv_head,
        n_layer=n_layer,
        d_intermediate=d_intermediate,
        vocab_size=vocab_size,
        pad_vocab_size_multiple=1,
        rope_theta=rope_theta,
        tie_embeddings=False,
    )


PRESETS = {
    "demo": {},
    "mamba-130m": _mamba(768, 24),
    "mamba-370m": _mamba(1024, 48),
    "mamba-790m": _mamba(1536, 48),
    "mamba-1.4b": _mamba(2048, 48),
    "mamba-2.8b": _mamba(2560, 64),
    "mamba2-130m": _mamba2(768, 24),
    "mamba2-370m": _mamba2(1024, 48),
    "mamba2-780m": _mamba2(1536, 48),
    "mamba2-1.3b": _mamba2(2048, 48),
    "mamba2-2.7b": _mamba2(2560, 64),
    "mamba_9.8b": dict(  # Bamba-9B: attention at layers 9, 18 and 27
        layers="9*mamba2+mlp,attention+mlp,8*mamba2+mlp,attention+mlp,8*mamba2+mlp,attention+mlp,4*mamba2+mlp",
        n_layer=32,
        d_model=4096,
        d_intermediate=14336,
        d_state=128,
        vocab_size=128256,
        pad_vocab_size_multiple=16,
        n_head=32,
        n_kv_head=8,
        head_dim=128,
        rotary_dim=64,
        tie_embeddings=False,
    ),
    "mambaoutai": dict(
        layers="mamba1", d_model=2688, n_layer=28, vocab_size=65024, tie_embeddings=False
    ),
    "llama2_1.4b": _llama(2048, 16, 4, 24, 6144),
    "llama2_7b": _llama(4096, 32, 32, 32, 11008),
    "llama2_13b": _llama(5120, 40, 40, 40, 13824),
    "llama2_34b": _llama(8192, 64, 8, 48, 22016, rope_theta=1e6),
    "llama2_70b": _llama(8192, 64, 8, 80, 28672),
    "llama3_194m": _llama(
        1024, 8, 8, 10, 2816, rope_theta=5e5
    ),  # 194 M with llama2's vocabulary, as there
    "llama3_1.8b": _llama(2048, 16, 8, 24, 7168, vocab_size=128256, rope_theta=5e5),
    "llama3_3.2b": _llama(3072, 24, 8, 24, 8192, vocab_size=128256, rope_theta=5e5),
    "llama3_8b": _llama(4096, 32, 8, 32, 14336, vocab_size=128256, rope_theta=5e5),
    "llama3_70b": _llama(8192, 64, 8, 80, 28672, vocab_size=128256, rope_theta=5e5),
}
OTHER_NAMES = {
    "bamba-9b": "mamba_9.8b",
    "llama2_34bcode": "llama2_34b",
    "7b": "llama2_7b",
    "13b": "llama2_13b",
    "34b": "llama2_34b",
    "70b": "llama2_70b",
}


def preset(name):
    """ModelConfig fields of the preset that `name` means, its own name as model_name among them.

    Names of the Hugging Face hub and of fms mean it too: an organisation before it, -hf or _4k (fms-fsdp's shorter
    context, which is seq_length's to say) behind it, case and the choice between - and _ don't matter. Raises UserError
    that says the nearest name.
    """
    meant = {known: known for known in PRESETS} | OTHER_NAMES
    spellings = {_plain(spelling): known for spelling, known in meant.items()}
    known = spellings.get(_plain(name))
    if known is None:
        near = difflib.get_close_matches(_plain(name), spellings, n=1)
        hint = (
            f"did you mean {spellings[near[0]]}?" if near else f"choose one of {', '.join(PRESETS)}"
        )
        raise UserError(f"model_name={name}: there is no such preset; {hint}")
    return {"model_name": known, **PRESETS[known]}


def usual_length(model_name):
    """Tokens of a sample that come with this name of a preset: those it was published with; of llama fms-fsdp's, and of
    names as the AWS test case writes them, state-spaces/mamba-130m, that one's."""
    name = preset(model_name)["model_name"]
    mamba = name.startswith(("mamba-", "mamba2-")) and "/" not in model_name
    return 256 if name == "demo" else 2048 if mamba else 4096


def title(model):
    """What a ModelConfig is called: by the name of its preset only while it has that preset's structure."""
    is_preset = model.structure() == ModelConfig(**preset(model.model_name)).structure()
    return model.model_name if is_preset else f"custom (from {model.model_name})"


def _plain(name):
    name = name.lower().rpartition("/")[2].removesuffix("-hf").removesuffix("_4k")
    return name.replace("-", "").replace("_", "")
