"""python -m mamba_fsdp export MODEL OUT [--format=hf|state-spaces|pth] [--dtype=fp32|bf16|fp16] [--tokenizer=FOLDER]

Write a model into the new folder OUT, one tensor in memory at a time: `hf` for transformers' AutoModelForCausalLM
(safetensors, with the tokenizer), `state-spaces` for mamba_ssm's MambaLMHeadModel.from_pretrained, `pth` for
consolidated.00.pth with config.json and tokenizer/, as a run writes it at its end. MODEL is a run folder, a checkpoint,
a .pth file, or a transformers or state-spaces folder.

  --dtype       of the numbers; without it they stay as they are
  --tokenizer   a tokenizer's folder to go along, in place of MODEL's own if it has one
  --model_name  the preset that MODEL is, where there is no config.json beside it
"""

from dataclasses import dataclass

from config.fields import setting


@dataclass
class ExportConfig:
    """The options beside the format, as the help page above tells them."""

    dtype: str = setting("")
    tokenizer: str = setting("")
    model_name: str = setting("")


DEFAULTS = ExportConfig()


def main(model: str, out: str, format: str = "hf", options: ExportConfig = DEFAULTS) -> None:
    from mamba_fsdp.interop.convert import write_model

    print(write_model(model, out, format=format, **vars(options)))
