"""python -m mamba_fsdp export MODEL OUT [--OPTION=VALUE ...]

Write a model into the new folder OUT, with one tensor in memory at a time.
MODEL is a run folder, a checkpoint, a .pth file, or a transformers or
state-spaces folder.
"""

from dataclasses import dataclass
from pathlib import Path

from mamba_fsdp.fields import setting
from mamba_fsdp.interop.places import check_model_path


@dataclass
class ImportConfig:
    """The options that import and export share."""

    dtype: str = setting("", choices=("fp32", "bf16", "fp16"), elsewhere="torch_dtype precision")
    """Dtype of the tensors in OUT. Empty: each tensor keeps its dtype."""
    tokenizer: str = setting("", is_path=True, elsewhere="tokenizer_path tokenizer_name")
    """Folder of a tokenizer to write in place of MODEL's own."""
    model_name: str = setting("", elsewhere="model_variant")
    """Preset of MODEL, if there is no config.json next to it."""


@dataclass
class ExportConfig(ImportConfig):
    format: str = setting("hf", choices=("hf", "state-spaces", "pth"), elsewhere="output_format")
    """Format of the output. hf: for transformers' AutoModelForCausalLM (safetensors, with the tokenizer); "GGUF, vLLM, SGLang" in
    docs/models.md converts it further. state-spaces: for mamba_ssm's MambaLMHeadModel.from_pretrained. pth: consolidated.00.pth with config.json and tokenizer/, as each run
    writes it at its end."""
    trial: bool = setting(True)
    """hf: before OUT appears, transformers has to load a small copy, compute the same and generate."""


def main(model: str, out: str, options: ExportConfig) -> None:
    print(export(model, out, options))


def export(model: str | Path, out: str | Path, options: ExportConfig) -> Path:
    """Writes a model into the new folder `out`, and returns the path of the folder.

    model: the path of a run, a checkpoint, a .pth file, or a transformers or state-spaces folder. Raises UserError if the
    model can't be read or has no representation in the format; then nothing is written."""
    check_model_path(model)
    from mamba_fsdp.interop.convert import write_model

    return write_model(model, out, **vars(options))
