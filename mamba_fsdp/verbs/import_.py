"""python -m mamba_fsdp import MODEL OUT [--OPTION=VALUE ...]

Write a model as consolidated.00.pth with config.json and tokenizer/ into the
new folder OUT; `export --format=pth` does the same. MODEL is a downloaded
transformers folder (Mamba, FalconMamba, Mamba2, Bamba, Granite 4, Falcon-H1,
Nemotron-H, Olmo Hybrid, Olmo 2, Qwen3, Qwen3.5, Llama) or state-spaces folder,
a run or checkpoint, or a .pth or .pt file of another trainer.
training.py --init_from accepts both MODEL and OUT.
"""

from mamba_fsdp.verbs import export


def main(model: str, out: str, options: export.ImportConfig) -> None:
    export.main(model, out, export.ExportConfig(format="pth", **vars(options)))
