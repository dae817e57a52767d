"""python -m mamba_fsdp import MODEL OUT [--dtype=fp32|bf16|fp16] [--tokenizer=FOLDER] [--model_name=PRESET]

Bring a model to consolidated.00.pth with its config.json and tokenizer/, in the new folder OUT: `export --format=pth`
under another name. MODEL is a transformers folder (Mamba, Mamba2, Bamba, Llama) or a state-spaces folder, downloaded
before, a run or checkpoint, or a .pth or .pt file of another trainer. training.py --init_from takes MODEL as well as
OUT. The options are those of export.
"""

from mamba_fsdp.verbs import export


def main(model: str, out: str, options: export.ExportConfig = export.DEFAULTS) -> None:
    export.main(model, out, format="pth", options=options)
