"""Makes small checkpoints, and reads them."""

import json
import os
from dataclasses import asdict

import torch

from mamba_fsdp.checkpoint.checkpointer import Checkpointer
from mamba_fsdp.checkpoint.contents import read_contents
from mamba_fsdp.checkpoint.files import compute_checksum
from mamba_fsdp.checkpoint.restore import VerifiedCheckpoint, find_checkpoint, verify
from mamba_fsdp.checkpoint.saved_run import SavedRun
from mamba_fsdp.parallel.model import Shard
from mamba_fsdp.parallel.world import World
from mamba_fsdp.run.layout import list_committed, step_name
from mamba_fsdp.run.lease import Lease
from mamba_fsdp.run.names import CHECKPOINTS, COMMIT, LEASE
from mamba_fsdp.run.records import read_entries

WORLD = World.alone()
TIMES = ("tokens_per_second", "mfu", "delaying_rank", "seconds", "goodput", "memory_gb")


def quiet(text):
    """Ignores a report."""


def shards_of(value):
    """Returns the shards of two tensors. The first tensor is filled with `value`."""
    full = torch.full((100,), float(value))
    return [Shard("a.weight", (10, 10), 0, full), Shard("b", (7,), 0, torch.arange(7.0))]


def open_run(run, world=WORLD, report=quiet, **how):
    """Returns a Checkpointer of the run folder. Rank 0 takes the folder away from any other process."""
    lease = Lease(run / LEASE)

    def take():
        (run / CHECKPOINTS).mkdir(parents=True, exist_ok=True)
        (run / LEASE).unlink(missing_ok=True)
        lease.acquire(report, "")

    world.on_rank0(take)
    return Checkpointer(run, world, lease, report=report, **how)


def make_checkpoints(run, steps, **how):
    """Saves a checkpoint for each of these steps, with tensors filled with the step. Returns the Checkpointer."""
    checkpointer = open_run(run, **how)
    for step in steps:
        checkpointer.save(step, shards_of(step), {"step": step})
        checkpointer.wait()
    return checkpointer


def saved_state(model, progress, seq_length=32):
    """Returns the state that a run with this ModelConfig stores in its checkpoints."""
    return asdict(SavedRun(progress, asdict(model), "adamw", "2.2.2", 1, seq_length))


def newest(run, report=quiet):
    """Returns the path of the newest intact checkpoint, or None."""
    if not list_committed(run / CHECKPOINTS):
        return None
    return find_checkpoint(run, WORLD, report).path


def assume_verified(checkpoint):
    """Returns a VerifiedCheckpoint with this path, without verifying its files."""
    return VerifiedCheckpoint(checkpoint, read_contents(checkpoint))


def flip(path, at=-5):
    """Changes one bit of a file."""
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


def edit(file, **changes):
    """Changes fields of a JSON file of a checkpoint, and the file's checksum in COMMIT. A field with the new value None
    is removed."""
    content = {**json.loads(file.read_text()), **changes}
    file.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))
    if file.name != "COMMIT":
        commit = json.loads((file.parent / "COMMIT").read_text())
        edit(
            file.parent / "COMMIT",
            files={**commit["files"], file.name: asdict(compute_checksum(file))},
        )


def commit_empty(run, *steps):
    """Makes checkpoints of these steps that contain only the file COMMIT."""
    for step in steps:
        path = run / CHECKPOINTS / step_name(step)
        path.mkdir(parents=True)
        (path / COMMIT).touch()


def list_names(run):
    return sorted(os.listdir(run / "checkpoints"))


def steps_in(run):
    return [int(name[5:]) for name in list_names(run) if name.startswith("step_")]


def problems(checkpoint):
    return verify(checkpoint, WORLD)


def metrics_of(run):
    """Returns the entries of a run's metrics.jsonl without times, rates and memory, because these differ between equal
    runs."""
    entries = read_entries(run / "metrics.jsonl")
    return [
        {key: value for key, value in entry.items() if not any(word in key for word in TIMES)}
        for entry in entries
    ]


def weights_of(run):
    """Returns {name: tensor} from the last consolidated file of a run."""
    return torch.load(sorted(run.glob("pth/step_*/consolidated.00.pth"))[-1], weights_only=True)
