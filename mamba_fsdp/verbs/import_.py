"""python -m mamba_fsdp import MODEL OUT [--dtype=fp32|bf16|fp16]

Bring a model into our form, consolidated.00.pth with its config.json and tokenizer/, in the new folder OUT. MODEL is a
transformers folder (Mamba, Mamba2, Bamba, Llama) or a state-spaces folder, downloaded before, or a run or checkpoint.
training.py --init_from takes MODEL as well as OUT.
"""


def main(model: str, out: str, dtype: str = "") -> None:
    from mamba_fsdp.interop.convert import to_our_form

    print(to_our_form(model, out, dtype=dtype or None))
