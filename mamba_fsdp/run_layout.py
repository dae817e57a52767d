"""The layout of a run folder: what everything in it is called, and which checkpoints count. Without torch.

    config.yaml  metrics.jsonl  status.json  lease.json  STOP  tokenizer/  failures/  preflight/
    checkpoints/step_00001000/   rank_00000.safetensors ...  state.json  COMMIT
    pth/step_00001000/           consolidated.00.pth  config.json  tokenizer/
    profile/  tensorboard/  wandb_id  loss.png

1.train.sbatch knows some of these names too; a test holds it to this file.
"""

import re
from pathlib import Path

SETTINGS, METRICS, STATUS, LEASE = "config.yaml", "metrics.jsonl", "status.json", "lease.json"
STOP = "STOP"  # whoever makes this file asks the run to stop
TOKENIZER = "tokenizer"  # of the data, beside the model that was trained on it
FAILURES, PREFLIGHT = "failures", "preflight"  # what the launcher leaves
CHECKPOINTS, STATE, COMMIT = "checkpoints", "state.json", "COMMIT"
MODELS, CONSOLIDATED, MODEL_CONFIG = "pth", "consolidated.00.pth", "config.json"
PROFILE, TENSORBOARD, WANDB_ID, LOSS_PICTURE = "profile", "tensorboard", "wandb_id", "loss.png"


def step_name(step: int) -> str:
    """The name of a checkpoint's folder, and of its model's."""
    return f"step_{step:08d}"


def step_of(name: str) -> int | None:
    """The step that a folder of this name holds; None for a name that step_name does not give."""
    match = re.fullmatch(r"step_(\d+)", name)
    return int(match[1]) if match else None


def rank_file(rank: int) -> str:
    """The name of what one rank wrote of a checkpoint."""
    return f"rank_{rank:05d}.safetensors"


def committed(checkpoints: str | Path) -> list[Path]:
    """The committed checkpoints in the folder `checkpoints`, oldest first, whole or not."""
    found = [(step, path) for path in Path(checkpoints).glob("*") if (step := step_of(path.name)) is not None]
    return [path for _, path in sorted(found) if (path / COMMIT).is_file()]
