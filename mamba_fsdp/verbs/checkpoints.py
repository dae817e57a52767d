"""python -m mamba_fsdp checkpoints RUN [--verify]

List the checkpoints of a run, or a single one: step, tokens, size, when it was committed, and whether it is whole.
`kept` are those that stay for ever (keep_every). Unfinished ones are being written, or a killed process left them; the
run removes those at its next start.

  --verify  read every byte and compare it with the checksums; without, only see that each file is there with its size

Exits with 0 where all are whole, with 1 where one is broken, with 2 where there is none.
"""

from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from mamba_fsdp.errors import UserError
from mamba_fsdp.report.console import Console, scaled
from mamba_fsdp.run_layout import CHECKPOINTS, COMMIT, KEPT, committed, no_checkpoint, step_of

UNKNOWN: dict[str, Any] = {"kept": False, "tokens": None, "committed": "", "verdict": ""}


def main(run: str, verify: bool = False) -> int:
    from mamba_fsdp.checkpoint.retention import held, left_over, size_of

    place, display = Path(run), Console()
    rows: list[dict[str, Any]] = []
    folder = place / CHECKPOINTS if (place / CHECKPOINTS).is_dir() else place
    found, unfinished = (
        ([place], []) if (place / COMMIT).is_file() else (committed(folder), left_over(folder))
    )
    if not found and not unfinished:
        raise no_checkpoint(place)
    for path in found:
        with held(path):
            display.passing(
                f"reading {path.name}, {len(rows) + 1} of {len(found)}, {scaled(size_of(path), 'B')}"
            )
            row = {"name": path.name, "bytes": size_of(path), **described(path, verify)}
            rows += [row] if path.exists() else []  # else its run has pruned it meanwhile
    rows += [
        {"name": path.name, "bytes": size_of(path), **UNKNOWN, "verdict": "unfinished"}
        for path in unfinished
    ]
    display.line(f"{'step':>10} {'tokens':>8} {'size':>9}  {'committed':<16}  verdict")
    for row in rows:
        step, tokens = (
            step_of(row["name"].strip(".").split(".")[0]),
            scaled(row["tokens"], "") if row["tokens"] else "",
        )
        display.line(
            f"{step or 0:>10} {tokens:>8} {scaled(row['bytes'], 'B'):>9}  {row['committed']:<16}  "
            f"{'kept; ' * row['kept']}{row['verdict']}"
        )
    return int(any(row["verdict"].startswith("broken") for row in rows))


def described(path: Path, verify: bool) -> dict[str, Any]:
    """What a committed checkpoint is, as far as it can be read."""
    from mamba_fsdp.checkpoint.folder import problems, read_state
    from mamba_fsdp.parallel.world import World

    told = {**UNKNOWN, "kept": (path / KEPT).exists()}
    with suppress(OSError):
        told["committed"] = (
            f"{datetime.fromtimestamp((path / COMMIT).stat().st_mtime):%Y-%m-%d %H:%M}"
        )
    try:
        wrong = problems(path, World.alone(), "all" if verify else "sizes")
        told["verdict"] = (
            f"broken: {'; '.join(wrong)}" if wrong else "whole" if verify else "not verified"
        )
        told["tokens"] = read_state(path)["state"].get("progress", {}).get("tokens")
    except UserError as error:  # of another version, say
        told["verdict"] = told["verdict"] if "broken" in told["verdict"] else f"broken: {error}"
    return told
