"""Everything there is to measure on a GPU, in one call and in order of worth: python -m benchmarks.gpu --all.

    python -m benchmarks.gpu --all [--out FOLDER] [--minutes 25] [--only NAME,...] [--rehearse]

Each part runs in a process of its own with its own time limit, so that one that hangs or fails takes no other along,
and writes its table into FOLDER (default: $OUT, else gpu-results) as it goes: NN-NAME.md, beside it .json, and .log
with what it said. summary.md gets a line when a part ends. --rehearse: the same with tiny models on the CPU. Where a
command may not take so long: --only and the same FOLDER go on with further parts.
"""

import argparse
import json
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
from functools import partial
from pathlib import Path

from mamba_fsdp.errors import first_line

PRESETS = ("mamba-1.4b", "mamba2-1.3b", "llama2_1.4b", "mamba-130m", "mamba2-2.7b", "mamba-2.8b")


def table(rows):
    """Markdown; columns in the order in which they first come."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    lines = [
        names,
        ["---"] * len(names),
        *([str(row.get(name, "")) for name in names] for row in rows),
    ]
    return (
        "\n".join(
            "| " + " | ".join(cell.replace("|", "/").replace("\n", " ") for cell in cells) + " |"
            for cells in lines
        )
        + "\n"
    )


def operators(device, rehearse, keep, **_):
    from benchmarks.gpu.operators import measure

    measure(device, rehearse, keep)


def repeat(rehearse, keep, scratch, **_):
    from benchmarks.gpu import runs

    runs.repeat(scratch, rehearse, keep)


def starts(rehearse, keep, scratch, **_):
    from benchmarks.gpu import runs

    runs.starts(scratch, rehearse, keep)


def beside_others(device, rehearse, keep, name, **_):
    from benchmarks.gpu import models, steps
    from config.model_config import ModelConfig
    from config.presets import preset
    from mamba_fsdp.model.init import initial_value
    from mamba_fsdp.model.spec import parameters

    config = ModelConfig(**(steps.TINY if rehearse else preset(name)))
    weights = {
        each: initial_value(each, described, 0) for each, described in parameters(config).items()
    }
    rows = []
    for length, batch in ((8, 1),) if rehearse else ((2048, 8), (4096, 4)):
        rows += models.compare(
            name,
            config,
            weights,
            length,
            batch,
            device=device,
            rounds=1 if rehearse else 2,
            steps=1 if rehearse else 5,
        )
        keep([dict(zip(models.Row.HEAD, row.cells())) for row in rows])


def trace(device, rehearse, keep, out, name, **_):
    from benchmarks.gpu import steps

    steps.trace(device, rehearse, out, keep, name)


def checkpoint(device, rehearse, keep, scratch, name, **_):
    from benchmarks.gpu import steps

    steps.checkpoint(device, rehearse, scratch, keep, name)


def machine(device, keep, **_):
    from benchmarks.gpu import models

    keep([{"": line} for line in models.provenance(device, ["--all"]).splitlines()])


# (name, seconds at most, what runs), in order of worth.
PARTS = [
    ("machine", 60, machine),
    ("operators", 180, operators),
    ("repeat", 300, repeat),
    *((f"step-{name}", 180, partial(beside_others, name=name)) for name in PRESETS[:3]),
    *((f"trace-{name}", 90, partial(trace, name=name)) for name in PRESETS[:2]),
    ("starts", 150, starts),
    ("checkpoint", 90, partial(checkpoint, name="mamba-1.4b")),
    *((f"step-{name}", 150, partial(beside_others, name=name)) for name in PRESETS[3:]),
]


def beside(stem, suffix):
    return stem.with_name(stem.name + suffix)


def in_its_process(part, stem, options, log):
    os.setsid()  # so that what it starts ends with it
    for stream in (1, 2):
        os.dup2(log, stream)
    sys.stdout = sys.stderr = os.fdopen(os.dup(log), "w", buffering=1)

    def keep(rows):
        beside(stem, ".md").write_text(table(rows))
        beside(stem, ".json").write_text(json.dumps(rows, indent=1, default=str))

    import torch

    device = torch.device("cpu") if options["rehearse"] else torch.device("cuda", 0)
    try:
        with tempfile.TemporaryDirectory(prefix="mamba-gpu-") as scratch:
            part(device=device, keep=keep, scratch=Path(scratch), **options)
    except Exception as error:
        traceback.print_exc()
        beside(stem, ".error").write_text(f"{type(error).__name__}: {first_line(error)}")
        sys.exit(1)


def run_part(number, name, limit, part, options):
    """What came of it, in a word or a line."""
    stem = options["out"] / f"{number:02d}-{name}"
    for suffix in (".md", ".json", ".error"):
        beside(stem, suffix).unlink(missing_ok=True)
    with open(beside(stem, ".log"), "wb") as log:
        process = multiprocessing.get_context("fork").Process(
            target=in_its_process, args=(part, stem, options, log.fileno())
        )
        process.start()
    process.join(limit)
    late = process.is_alive()
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.join()
    error = beside(stem, ".error")
    said = (
        error.read_text()
        if error.exists()
        else ""
        if process.exitcode == 0
        else f"ended with {process.exitcode}"
    )
    error.unlink(missing_ok=True)
    return f"stopped after {limit:.0f} s" if late else said or "done"


def main(arguments, parts=None):
    """Exit code 0 where every part did; parts: for tests."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu --all",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", type=Path, default=os.environ.get("OUT") or "gpu-results")
    parser.add_argument("--minutes", type=float, default=25)
    parser.add_argument("--only", type=lambda text: text.split(","), default=[])
    parser.add_argument("--rehearse", action="store_true")
    asked = parser.parse_args(arguments)
    import torch  # once for all parts: a process that has not used CUDA yet can be forked

    out, ends, rows = Path(asked.out), time.monotonic() + 60 * asked.minutes, []
    if not asked.rehearse and not torch.version.cuda:
        print(
            "error: benchmarks.gpu needs a CUDA device; --rehearse tries all of it on the CPU",
            file=sys.stderr,
        )
        return 2
    out.mkdir(parents=True, exist_ok=True)
    for number, (name, limit, part) in enumerate(parts or PARTS):
        if asked.only and name not in asked.only:
            continue
        began, limit = time.monotonic(), min(limit, ends - time.monotonic())
        outcome = (
            run_part(number, name, limit, part, {"out": out, "rehearse": asked.rehearse})
            if limit > 5
            else "no time was left"
        )
        rows.append(
            {"part": name, "seconds": f"{time.monotonic() - began:.0f}", "outcome": outcome}
        )
        print(f"{name:<24}{rows[-1]['seconds']:>5} s  {outcome}", flush=True)
        tables = (
            f"\n## {path.stem}\n\n{path.read_text()}"
            for path in sorted(out.glob("[0-9][0-9]-*.md"))
        )
        (out / "summary.md").write_text(table(rows) + "".join(tables))
    return int(any(row["outcome"] != "done" for row in rows))
