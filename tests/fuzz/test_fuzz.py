"""Tests that readers of damaged files return a result or an error of one line, quickly and with little memory.

By default, each kind of file is damaged a few times; FUZZ_ROUNDS=2000 makes thousands of tries. The message of a
failure contains its seed, and FUZZ_SEED=N FUZZ_ROUNDS=1 repeats the failure.
"""

import contextlib
import json
import math
import os
import random
import resource
import shutil
import signal
from dataclasses import asdict
from pathlib import Path

import pytest
import safetensors.torch
import torch

from mamba_fsdp.checkpoint import files as checkpoint_files
from mamba_fsdp.checkpoint.restore import find_checkpoint
from mamba_fsdp.checkpoint.saved_run import TrainState, read_saved_run
from mamba_fsdp.checkpoint.tensors import CheckpointTensors
from mamba_fsdp.data import tokenizer
from mamba_fsdp.data.store import TokenStore, _checksum
from mamba_fsdp.errors import UserError
from mamba_fsdp.importing import make_dataset
from mamba_fsdp.interop.convert import write_model
from mamba_fsdp.interop.pth_files import PthTensors
from mamba_fsdp.interop.weights import read_weights
from mamba_fsdp.parallel.model import Shard
from mamba_fsdp.parallel.world import World
from mamba_fsdp.run.names import COMMIT, STATE
from mamba_fsdp.settings import resolve
from mamba_fsdp.settings.dataset_config import DatasetConfig
from tests.support.checkpoints import open_run, saved_state
from tests.support.corpora import write_store
from tests.support.foreign_tokens import write_fms, write_layout
from tests.support.small_models import CONFIGS, random_state, write_ours

ROUNDS, SEED = int(os.environ.get("FUZZ_ROUNDS", 30)), int(os.environ.get("FUZZ_SEED", 0))
# Limits of processor time in seconds and of additional memory in bytes, for reading a file of some kilobytes.
SECONDS, MEMORY = 20, 2 << 30
DOCUMENTS = [[1, 2, 3], list(range(1, 40)), [5] * 7]
ODD = [
    *(-1, 0, 1, 2**31, 2**63, 10**30, 1e308, float("nan"), True, None),
    *("", "..", "../outside", "/etc/passwd", "a" * 5000, [], {}, [[]], {"a": {}}),
]
BAD_JSON = (ValueError, TypeError, AttributeError, RecursionError, KeyError, OSError)


# For each format, make_FORMAT(folder) writes files, and read_FORMAT(folder) reads them in the same way as the program.


def make_store(folder):
    how = dict(vocab_size=64, eos=0, tokenizer="", shard_tokens=40)
    write_store(folder / "data", DOCUMENTS, **how)


def seal_store(folder):
    """Updates the checksum of a damaged store, because an attacker would do so, too."""
    with contextlib.suppress(*BAD_JSON):
        index = json.loads((folder / "data/index.json").read_bytes())
        index["checksum"] = _checksum(index)
        (folder / "data/index.json").write_text(json.dumps(index))


def read_store(folder):
    source = TokenStore(folder / "data")
    count = min(source.token_count, 1000)
    if count:
        source.read(0, count)
        source.read(source.token_count - count, count)


def make_checkpoint(folder):
    shards = [
        Shard("a.weight", (40, 10), 0, torch.rand(400)),
        Shard("b", (7,), 0, torch.arange(7.0)),
    ]
    settings = resolve.resolve_settings({"save_ckpt_path": "x", "d_model": "16", "n_layer": "1"})
    checkpointer = open_run(folder)
    state = saved_state(settings.model, TrainState(step=3, samples=6, tokens=48))
    checkpointer.save(3, shards, state)
    checkpointer.wait()


def seal_checkpoint(folder):
    """Updates the checksums of a damaged checkpoint, because an attacker would do so, too."""
    for path in (folder / "checkpoints").glob("*/" + COMMIT):
        with contextlib.suppress(*BAD_JSON):
            content = json.loads(path.read_bytes())
            for name in content["files"]:
                if name != STATE or not content["files"][name].get("model"):
                    content["files"][name] = asdict(
                        checkpoint_files.compute_checksum(path.parent / name)
                    )
            path.write_text(json.dumps(content))


def read_checkpoint(folder):
    checkpoint = find_checkpoint(folder, World.alone(), lambda text: None)
    tensors = CheckpointTensors(checkpoint)
    for name, shape in tensors.shapes.items():
        # Runs read tensors only after they have compared the shapes with the model. Large shapes are therefore skipped.
        if math.prod(shape) < 1 << 20:
            tensors.get(name)
    read_saved_run(checkpoint.path)


def make_model(folder):
    """Writes a model in the format of transformers, in two files with an index, and in our format."""
    write_ours(folder / "ours", CONFIGS["mamba1"])
    write_model(folder / "ours", folder / "theirs")
    whole = folder / "theirs/model.safetensors"
    tensors = safetensors.torch.load_file(whole)
    whole.unlink()
    weight_map = {name: f"{len(name) % 2}.safetensors" for name in tensors}
    for file in set(weight_map.values()):
        part = {name: tensors[name] for name in tensors if weight_map[name] == file}
        safetensors.torch.save_file(part, folder / "theirs" / file, {"format": "pt"})
    index = whole.with_name("model.safetensors.index.json")
    index.write_text(json.dumps({"weight_map": weight_map}))


def read_models(folder):
    for name in ("ours", "theirs"):
        read_weights(folder / name)


def make_pth(folder):
    torch.save({"model_state": random_state(CONFIGS["mamba1"]), "step": 3}, folder / "weights.pth")


def read_pth(folder):
    PthTensors(folder / "weights.pth")


def make_tokenizer(folder):
    tokenizer.train(["a few words", "and a few more"], 300).save(folder)


def read_tokenizer(folder):
    tokenizer.load_for_prompts(folder).encode("a few words")
    list(tokenizer.identities_in(folder))


def make_layout(folder):
    (folder / "data").mkdir()
    write_layout(folder / "data/a.npy", DOCUMENTS)


def make_fms(folder):
    write_fms(folder / "data/a.arrow", DOCUMENTS)


def read_tokens(folder):
    """Reads token ids in the same way as get_dataset.py."""
    options = DatasetConfig("none", eos_token="0", vocab_size=1 << 17, validation_fraction=0)
    make_dataset.make_dataset(str(folder / "data"), folder / "out", options)


READERS = {  # {name: (make, read, seal)}; seal updates the checksums, and is called for half of the mutations
    "store": (make_store, read_store, seal_store),
    "checkpoint": (make_checkpoint, read_checkpoint, seal_checkpoint),
    "model": (make_model, read_models, None),
    "pth": (make_pth, read_pth, None),
    "tokenizer": (make_tokenizer, read_tokenizer, None),
    "layout": (make_layout, read_tokens, None),
    "fms": (make_fms, read_tokens, None),
}


# The mutations


def mutated(content, random):
    """Returns `content` with one random change of some bytes."""
    at, length = random.randrange(len(content) + 1), random.randrange(1, 64)
    kind = random.randrange(6)
    if kind == 0:
        return content[:at]
    if kind == 1:
        return content[:at] + content[at + length :]
    if kind == 2:
        return content[:at] + random.randbytes(length) + content[at:]
    # Headers begin with sizes, so the first bytes are changed more often than others.
    if kind == 3:
        at = random.randrange(16)
        return content[:at] + random.randbytes(8) + content[at + 8 :]
    if kind == 4:
        return b"[" * 200_000
    changed = bytearray(content or b"\0")
    for _ in range(random.randrange(1, 9)):
        changed[random.randrange(len(changed))] ^= 1 << random.randrange(8)
    return bytes(changed)


def mutated_tree(value, random):
    """Returns the JSON value with one random change: an item is replaced, removed or added."""
    places = list(places_in(value))
    if not places:
        return random.choice(ODD)
    holder, key = random.choice(places)
    kind = random.randrange(6)
    if kind == 0:
        del holder[key]
    elif kind == 1 and isinstance(holder, dict):
        holder[str(random.choice(ODD))[:50]] = random.choice(ODD)
    elif kind < 4 and isinstance(holder[key], int):
        holder[key] += random.choice([-1, 1, 1000, -1000])
    else:
        holder[key] = random.choice(ODD)
    return value


def places_in(value):
    if isinstance(value, (dict, list)):
        for key in list(value) if isinstance(value, dict) else range(len(value)):
            yield value, key
            yield from places_in(value[key])


def damage(path, random):
    content = path.read_bytes()
    is_json = path.suffix == ".json" or path.name == COMMIT
    if is_json and random.randrange(3):
        path.write_text(json.dumps(mutated_tree(json.loads(content), random)))
    else:
        path.write_bytes(mutated(content, random))


class TooLong(Exception):
    pass


@contextlib.contextmanager
def bounded():
    """Limits the memory and the processor time of the block, so that the result does not depend on how busy the
    machine is."""

    def stop(*_):
        raise TooLong(f"takes longer than {SECONDS} s")

    before = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    previous = signal.signal(signal.SIGPROF, stop)
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, before[1]))
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        resource.setrlimit(resource.RLIMIT_AS, before)
        signal.signal(signal.SIGPROF, previous)


@pytest.mark.slow
@pytest.mark.parametrize("name", READERS)
def test_any_file_gives_a_result_or_a_line(name, tmp_path, monkeypatch):
    make, read, seal = READERS[name]
    original, folder = tmp_path / "original", tmp_path / "mutated"
    original.mkdir()
    make(original)
    files = sorted(path.relative_to(original) for path in original.rglob("*") if path.is_file())
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    shutil.copytree(original, folder)
    read(folder)  # raises no error before the first mutation
    refused = 0
    for seed in range(SEED, SEED + ROUNDS):
        shutil.rmtree(folder)
        shutil.copytree(original, folder)
        chance = random.Random(f"{name} {seed}")
        damaged = chance.choice(files)
        damage(folder / damaged, chance)
        if seal and chance.randrange(2):
            seal(folder)
        try:
            with bounded():
                read(folder)
        except UserError:
            refused += 1
        except BaseException as error:
            problem = f"{name}, seed {seed}, {damaged}: {type(error).__name__}: {error}"
            raise AssertionError(problem) from error
    assert refused or ROUNDS < 10
