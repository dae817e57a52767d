"""python -m mamba_fsdp export MODEL OUT [--format=hf|state-spaces] [--dtype=fp32|bf16|fp16]

Write a model in another library's form into the new folder OUT: `hf` for transformers' AutoModelForCausalLM
(safetensors, with the tokenizer), `state-spaces` for mamba_ssm's MambaLMHeadModel.from_pretrained. MODEL is a run
folder, a checkpoint, a consolidated.00.pth, or a transformers or state-spaces folder. Without --dtype the numbers stay
as they are.
"""


def main(model: str, out: str, format: str = "hf", dtype: str = "") -> None:
    from mamba_fsdp.interop.convert import to_foreign_form

    print(to_foreign_form(model, out, format=format, dtype=dtype or None))
