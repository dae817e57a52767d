"""python -m mamba_fsdp import MODEL OUT [--dtype=fp32|bf16|fp16] [--tokenizer=FOLDER] [--model_name=PRESET]

Bring a model into our form, consolidated.00.pth with its config.json and tokenizer/, in the new folder OUT. MODEL is a
transformers folder (Mamba, Mamba2, Bamba, Llama) or a state-spaces folder, downloaded before, a run or checkpoint, or
a .pth or .pt file of another trainer. training.py --init_from takes MODEL as well as OUT.

  --dtype       of the numbers; without it they stay as they are
  --tokenizer   a tokenizer's folder to go along, where MODEL came without one
  --allow_other_tokenizer  where you know that --tokenizer fits MODEL, which came with another
  --model_name  the preset that MODEL is, where there is no config.json beside it
"""


def main(
    model: str,
    out: str,
    dtype: str = "",
    tokenizer: str = "",
    model_name: str = "",
    allow_other_tokenizer: bool = False,
) -> None:
    from mamba_fsdp.interop.convert import to_our_form

    print(
        to_our_form(
            model,
            out,
            dtype=dtype or None,
            tokenizer=tokenizer,
            model_name=model_name,
            allow_other_tokenizer=allow_other_tokenizer,
        )
    )
