"""python -m mamba_fsdp export MODEL OUT [--format=hf|state-spaces] [--dtype=fp32|bf16|fp16] [--tokenizer=FOLDER]

Write a model in another library's form into the new folder OUT: `hf` for transformers' AutoModelForCausalLM
(safetensors, with the tokenizer), `state-spaces` for mamba_ssm's MambaLMHeadModel.from_pretrained. MODEL is a run
folder, a checkpoint, a .pth file, or a transformers or state-spaces folder.

  --dtype       of the numbers; without it they stay as they are
  --tokenizer   a tokenizer's folder to go along, where MODEL came without one
  --allow_other_tokenizer  where you know that --tokenizer fits MODEL, which came with another
  --model_name  the preset that MODEL is, where there is no config.json beside it
"""


def main(
    model: str,
    out: str,
    format: str = "hf",
    dtype: str = "",
    tokenizer: str = "",
    model_name: str = "",
    allow_other_tokenizer: bool = False,
) -> None:
    from mamba_fsdp.interop.convert import write_model

    print(
        write_model(
            model,
            out,
            format=format,
            dtype=dtype or None,
            tokenizer=tokenizer,
            model_name=model_name,
            allow_other_tokenizer=allow_other_tokenizer,
        )
    )
