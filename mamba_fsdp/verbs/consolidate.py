"""python -m mamba_fsdp consolidate RUN [--step=N]

Write a run's model as one file, as a run does at its end: consolidated.00.pth with config.json and tokenizer/, in
RUN/pth/step_N; `import` writes it elsewhere, and with other numbers. On one machine, tensor by tensor: it takes the
memory of the largest one. The folder gets its name when all is written; what a kill leaves, the same command replaces.

  --step    of which checkpoint; without it of the newest whole one
"""

import time
from pathlib import Path
from typing import Annotated

from config.fields import Bounds
from mamba_fsdp.errors import UserError
from mamba_fsdp.run_layout import (
    CHECKPOINTS,
    COMMIT,
    CONSOLIDATED,
    MODELS,
    committed,
    step_name,
    step_of,
)


def main(run: str, step: Annotated[int, Bounds(at_least=-1)] = -1) -> None:
    from mamba_fsdp.checkpoint.folder import find_checkpoint
    from mamba_fsdp.interop.convert import publish
    from mamba_fsdp.parallel.world import World
    from mamba_fsdp.report.console import scaled

    place, began = Path(run), time.perf_counter()
    if step >= 0:
        place = place / CHECKPOINTS / step_name(step)
        if not (place / COMMIT).is_file():
            steps = ", ".join(str(step_of(path.name)) for path in committed(place.parent))
            raise UserError(
                f"--step={step}: {run} has no checkpoint of that step; it has {steps or 'none'}"
            )
    checkpoint = find_checkpoint(place, World.alone(), part="model")
    file = checkpoint.parent.parent / MODELS / checkpoint.name / CONSOLIDATED
    if file.is_file():
        return print(f"{file} is there already")
    publish(checkpoint, file.parent, verified=True)
    print(
        f"{file}: {scaled(file.stat().st_size, 'B')} of {checkpoint} in {time.perf_counter() - began:.1f} s"
    )
