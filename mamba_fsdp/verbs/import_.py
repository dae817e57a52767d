"""python -m mamba_fsdp import MODEL OUT [--OPTION=VALUE ...]

Write a model as consolidated.00.pth with config.json and tokenizer/ into the
new folder OUT: `export --format=pth` under another name. MODEL is a
transformers folder (Mamba, FalconMamba, Mamba2, Bamba, Granite 4, Falcon-H1,
Nemotron-H, Llama) or a state-spaces folder, downloaded before, a run or
checkpoint, or a .pth or .pt file of another trainer. training.py --init_from
takes MODEL as well as OUT.
"""

from mamba_fsdp.verbs import export


def main(model: str, out: str, options: export.ImportConfig) -> None:
    export.main(model, out, export.ExportConfig(format="pth", **vars(options)))
