"""The published models by name, out of models.yaml."""

import dataclasses
from pathlib import Path
from typing import Any

from config.fields import near_name, read_field
from config.model_config import ModelConfig
from config.text_yaml import load_yaml
from mamba_fsdp.errors import UserError

FILE = Path(__file__).with_name("models.yaml")
OTHER_NAMES = {
    "bamba-9b": "mamba_9.8b",
    "llama2_34bcode": "llama2_34b",
    "7b": "llama2_7b",
    "13b": "llama2_13b",
    "34b": "llama2_34b",
    "70b": "llama2_70b",
}


def read_presets() -> dict[str, dict[str, Any]]:
    """{name of a model: the ModelConfig fields that differ from its defaults}."""
    leaves = {leaf.name: leaf for leaf in dataclasses.fields(ModelConfig)}
    presets = {}
    for model, values in load_yaml(FILE, ours=True).items():
        presets[model] = {
            name: read_field(name, leaves[name], text) for name, text in values.items()
        }
    return presets


PRESETS = read_presets()


def preset(name: str) -> dict[str, Any]:
    """ModelConfig fields of the preset that `name` means, its own name as model_name among them.

    Names of the Hugging Face hub and of fms mean it too: an organisation before it, -hf or _4k
    (fms-fsdp's shorter context, which is seq_length's to say) behind it, case and the choice
    between - and _ don't matter. Raises UserError that says the nearest name.
    """
    spellings = {_plain(known): known for known in PRESETS}
    spellings |= {_plain(other): known for other, known in OTHER_NAMES.items()}
    known = spellings.get(_plain(name))
    if known is None:
        hint = near_name(name, PRESETS, f"choose one of {', '.join(PRESETS)}")
        raise UserError(f"model_name={name}: there is no such preset; {hint}")
    return {"model_name": known, **PRESETS[known]}


def _plain(name: str) -> str:
    name = name.lower().rpartition("/")[2].removesuffix("-hf").removesuffix("_4k")
    return name.replace("-", "").replace("_", "")


def usual_length(model_name: str) -> int:
    """Tokens of a sample that come with this name of a preset: those it was published with; of
    llama fms-fsdp's, and of names as the AWS test case writes them, state-spaces/mamba-130m, that
    one's."""
    name = preset(model_name)["model_name"]
    if name == "demo":
        return 256
    if name.startswith(("mamba-", "mamba2-")) and "/" not in model_name:
        return 2048
    return 4096


def title(model: ModelConfig) -> str:
    """What a ModelConfig is called: by the name of its preset only while it has that preset's
    structure."""
    named = ModelConfig(**preset(model.model_name))
    if model.structure() == named.structure():
        return model.model_name
    return f"custom (from {model.model_name})"
