"""Files from anywhere: whatever is in them, a reader gives a result or a line of error, soon and in little memory.

A few mutations of each file of each kind by default; thousands with FUZZ_ROUNDS=2000. The seed of a failure is in its
message: FUZZ_SEED=N FUZZ_ROUNDS=1 makes that one again.
"""

import contextlib
import gzip
import io
import json
import math
import os
import random
import resource
import shutil
import signal
from dataclasses import asdict
from functools import partial
from pathlib import Path
from unittest.mock import patch

import datasets
import pyarrow
import pyarrow.parquet
import pytest
import safetensors.torch
import torch
import yaml
import zstandard

from mamba_fsdp.checkpoint import files as checkpoint_files
from mamba_fsdp.checkpoint.checkpointer import Checkpointer
from mamba_fsdp.checkpoint.contents import read_state
from mamba_fsdp.checkpoint.restore import find_checkpoint
from mamba_fsdp.checkpoint.tensors import open_checkpoint
from mamba_fsdp.data import corpus, reading, tokenize, tokenizer
from mamba_fsdp.data.store import TokenStore, _checksum
from mamba_fsdp.data.tokenizer import identities_in
from mamba_fsdp.errors import UserError
from mamba_fsdp.interop.convert import write_model
from mamba_fsdp.interop.pth_files import open_pth
from mamba_fsdp.interop.weights import read_weights
from mamba_fsdp.lease import Holder
from mamba_fsdp.parallel.model import Shard
from mamba_fsdp.parallel.world import World
from mamba_fsdp.report.page import make_page
from mamba_fsdp.run_layout import COMMIT, STATE
from mamba_fsdp.settings import resolve
from mamba_fsdp.settings.dataset_config import DatasetConfig
from mamba_fsdp.trainer.state import TrainState
from mamba_fsdp.verbs import checkpoints, inspect
from tests.support.corpora import write_store
from tests.support.others_tokens import write_fms, write_layout
from tests.support.small_models import CONFIGS, random_state, write_ours

ROUNDS, SEED = int(os.environ.get("FUZZ_ROUNDS", 40)), int(os.environ.get("FUZZ_SEED", 0))
SECONDS, MEMORY = 20, 2 << 30  # that a reader may take of a file of some kilobytes
DOCUMENTS = [[1, 2, 3], list(range(1, 40)), [5] * 7]
POSITION = {
    "pattern": {},
    "identity": {},
    "seed": 1,
    "seq_length": 8,
    "drawn": {"a": 6},
    "windows": {"a": 9},
}
ODD = [
    -1,
    0,
    1,
    2**31,
    2**63,
    10**30,
    1e308,
    float("nan"),
    "",
    "..",
    "../outside",
    "/etc/passwd",
    "a" * 5000,
    None,
    [],
    {},
    True,
    [[]],
    {"a": {}},
]


# What is read: make(folder) writes it, read(folder) reads it as a run or a verb would.


def read_source(folder):
    source = TokenStore(folder / "data")
    count = min(source.token_count, 1000)
    if count:
        source.read(0, count)
        source.read(source.token_count - count, count)


def make_store(folder):
    how = dict(vocab_size=64, eos=0, tokenizer="", shard_tokens=40)
    write_store(folder / "data", DOCUMENTS, **how)


def seal_store(folder):
    """Whoever makes a store can give it the checksum it asks for."""
    with contextlib.suppress(ValueError, TypeError, AttributeError, RecursionError):
        index = json.loads((folder / "data/index.json").read_bytes())
        index["checksum"] = _checksum(index)
        (folder / "data/index.json").write_text(json.dumps(index))


def make_checkpoint(folder):
    shards = [
        Shard("a.weight", (40, 10), 0, torch.rand(400)),
        Shard("b", (7,), 0, torch.arange(7.0)),
    ]
    settings, _ = resolve.resolve_settings({"save_ckpt_path": "x", "d_model": "16", "n_layer": "1"})
    checkpointer = Checkpointer(folder, World.alone())
    checkpointer.save(
        3, shards, TrainState(step=3, samples=6, tokens=48, data=POSITION).saved(settings, 1)
    )
    checkpointer.wait()


def seal_checkpoint(folder):
    """Whoever makes a checkpoint can give it the checksums it asks for."""
    for path in (folder / "checkpoints").glob("*/" + COMMIT):
        with contextlib.suppress(
            ValueError, TypeError, AttributeError, RecursionError, KeyError, OSError
        ):
            content = json.loads(path.read_bytes())
            for name in content["files"]:
                if name != STATE or "model" not in content["files"][name]:
                    content["files"][name] = checkpoint_files.checksum(path.parent / name)
            path.write_text(json.dumps(content))


def read_checkpoint(folder):
    checkpoint = find_checkpoint(folder, World.alone(), lambda text: None).path
    tensors = open_checkpoint(checkpoint, World.alone())
    for name, shape in tensors.shapes.items():
        if math.prod(shape) < 1 << 20:  # as who reads it has seen that these are the model's shapes
            tensors.get(name)
    TrainState.from_saved(read_state(checkpoint).state, checkpoint)


def make_model(folder):
    """As transformers writes a large one, in two files and an index, and ours."""
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


def make_pth(folder):
    torch.save({"model_state": random_state(CONFIGS["mamba1"]), "step": 3}, folder / "weights.pth")


def make_yaml(folder):
    settings, _ = resolve.resolve_settings(
        {"datasets": "a,b", "weights": "1,2", "dataset_path": "data"}
    )
    (folder / "settings.yaml").write_text(resolve.as_yaml(settings))


def make_run(folder):
    """What each verb looks at of a run that was killed."""
    make_checkpoint(folder)
    moment = "2026-01-01T00:00:00+00:00"
    for name, lines in {
        "metrics": [
            {"step": step, "tokens": 9 * step, "loss": 3.0, "tokens_per_second": 5.0}
            for step in range(9)
        ]
        + [{"step": 9, "val_loss": 3.0, "val_share": 0.5, "source_epochs": {"a": 0.5}}],
        "events": [
            {"time": moment, "event": "started", "step": 0, "ranks": 1, "from": "the start"},
            {"time": moment, "event": "checkpoint", "step": 3, "bytes": 99, "seconds": 0.1},
        ],
        "generated": [{"step": 3, "prompt": "a", "text": "b"}],
    }.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "status.json").write_text(
        json.dumps({"status": "running", "step": 3, "reason": "", "time": moment})
    )
    (folder / "lease.json").write_text(
        json.dumps({**asdict(Holder.this_process()), "pid": 2**22 + 1})
    )
    (folder / "config.yaml").write_text(
        yaml.safe_dump({"model": {"d_model": 16}, "data": {"datasets": ["a", "b"]}})
    )


def call_all(*readers):
    """Calls each, also where one before it refuses what it reads."""
    refused = []
    for read in readers:
        try:
            read()
        except UserError as error:
            refused.append(error)
    if refused:
        raise refused[0]


def read_run(folder):
    """As the verbs do, each of which may refuse it."""

    call_all(
        lambda: inspect.main(str(folder), inspect.Options()),
        lambda: inspect.main(f"{folder}/checkpoints/step_00000003", inspect.Options()),
        lambda: checkpoints.main(str(folder), checkpoints.Options()),
        lambda: make_page([folder]),
    )


def make_tokenizer(folder):
    tokenizer.train(["a few words", "and a few more"], 300).save(folder)


def read_tokenizer(folder):
    call_all(
        lambda: tokenizer.load_words(folder).encode("a few words"),
        lambda: tokenizer.load(str(folder)).encode("a few words"),
        lambda: [*identities_in(folder)],
    )


def make_texts(folder):
    rows, inputs = (
        pyarrow.table({"text": [f"document {number}" for number in range(9)]}),
        folder / "texts",
    )
    inputs.mkdir()
    (inputs / "a.txt").write_text("some words\n" * 9)
    (inputs / "b.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows.to_pylist()))
    (inputs / "d.jsonl.gz").write_bytes(gzip.compress((inputs / "b.jsonl").read_bytes()))
    (inputs / "e.csv.zst").write_bytes(zstandard.compress(b"id,text\n" + b"1,words\n" * 9))
    pyarrow.parquet.write_table(rows, inputs / "f.parquet", row_group_size=4)
    coded = pyarrow.table({"text": rows["text"].combine_chunks().dictionary_encode()})
    for name, table in (("g", rows), ("h", pyarrow.table({"text": DOCUMENTS * 4})), ("i", coded)):
        with pyarrow.ipc.new_stream(str(inputs / f"{name}.arrow"), table.schema) as writer:
            writer.write_table(table, max_chunksize=4)
    pyarrow.parquet.write_table(pyarrow.table({"text": DOCUMENTS}), inputs / "j.parquet")


def read_texts(folder):
    def read(path):
        shard = corpus.Shard(str(path), corpus.kind_of(path))
        for batch in reading.read_batches([shard], DatasetConfig(), 100):
            assert all(len(document.content) for document in batch.documents)

    call_all(*(partial(read, path) for path in sorted((folder / "texts").iterdir())))


def read_tokens(folder):
    """As get_dataset.py imports them."""
    options = DatasetConfig("none", eos_token="0", vocab_size=1 << 17, validation_fraction=0)
    tokenize.make_dataset(str(folder / "data"), folder / "out", options)


def make_layout(folder):
    (folder / "data").mkdir()
    write_layout(folder / "data/a.npy", DOCUMENTS)


def make_rows(folder):
    datasets.Dataset.from_dict({"input_ids": DOCUMENTS}).save_to_disk(folder / "data")


def read_dataset(folder):
    """Resumes."""
    options = DatasetConfig(tokenizer="train:300", documents="lines", shard_tokens=40)
    with patch.object(tokenize, "BATCH_SIZE", 100), patch.object(reading, "BLOCK", 100):
        tokenize.make_dataset(str(folder.parent / "texts.txt"), folder / "data", options)


def make_dataset(folder):
    """Interrupted in the middle."""
    (folder.parent / "texts.txt").write_text("some words and others\n" * 40)
    real, batches = tokenize._Part._write, []

    def interrupted(*given):
        batches.append(given)
        if len(batches) == 4:
            raise KeyboardInterrupt
        return real(*given)

    with (
        patch.object(tokenize._Part, "_write", interrupted),
        patch.object(tokenize, "SAVE_SECONDS", 0.0),
        contextlib.suppress(KeyboardInterrupt),
    ):
        read_dataset(folder)


READERS = {  # name: (make, read, seal: what makes checksums fit again, which half of the mutations get)
    "store": (make_store, read_source, seal_store),
    "checkpoint": (make_checkpoint, read_checkpoint, seal_checkpoint),
    "run": (make_run, read_run, seal_checkpoint),
    "model": (
        make_model,
        lambda folder: [read_weights(folder / name) for name in ("ours", "theirs")],
        None,
    ),
    "pth": (make_pth, lambda folder: open_pth(folder / "weights.pth"), None),
    "yaml": (
        make_yaml,
        lambda folder: resolve.resolve_settings({}, str(folder / "settings.yaml")),
        None,
    ),
    "layout": (make_layout, read_tokens, None),
    "tokenizer": (make_tokenizer, read_tokenizer, None),
    "texts": (make_texts, read_texts, None),
    "dataset": (make_dataset, read_dataset, None),
    "fms": (lambda folder: write_fms(folder / "data/a.arrow", DOCUMENTS), read_tokens, None),
    "rows": (make_rows, read_tokens, None),
}


# What is done to them


def mutated(content, random):
    """Some bytes in place of `content`."""
    at, length = random.randrange(len(content) + 1), random.randrange(1, 64)
    kind = random.randrange(8)
    if kind == 0:
        return content[:at]
    if kind == 1:
        return content[:at] + content[at + length :]
    if kind == 2:
        return content[:at] + random.randbytes(length) + content[at:]
    if kind == 3:
        return (
            content[:at]
            + random.choice([b"\xff", b"\0", b"\x7f"]) * random.choice([1, 4, 8])
            + content[at + 8 :]
        )
    if kind == 4:
        return content + content[at : at + length]
    if kind == 5 and len(content) > 16:  # headers are where sizes stand
        at = random.randrange(16)
        return content[:at] + random.randbytes(8) + content[at + 8 :]
    if kind == 6:
        return b"[" * 200_000
    changed = bytearray(content or b"\0")
    for _ in range(random.randrange(1, 9)):
        changed[random.randrange(len(changed))] ^= 1 << random.randrange(8)
    return bytes(changed)


def mutated_tree(value, random):
    """`value`, of JSON or YAML, with one place that says something else, is gone or has something new."""
    places = list(places_in(value))
    if not places:
        return random.choice(ODD)
    holder, key = random.choice(places)
    if random.randrange(6) == 0:
        del holder[key]
    elif random.randrange(6) == 0 and isinstance(holder, dict):
        holder[str(random.choice(ODD))[:50]] = random.choice(ODD)
    elif isinstance(holder[key], int) and random.randrange(2):
        holder[key] += random.choice([-1, 1, 1000, -1000])
    else:
        holder[key] = random.choice(ODD)
    return value


def places_in(value):
    items = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    for key, inner in items:
        yield value, key
        yield from places_in(inner)


def damage(path, random):
    content = path.read_bytes()
    if path.suffix in (".json", ".jsonl", ".yaml") or path.name == COMMIT:
        if random.randrange(3):
            load, dump = (
                (yaml.safe_load, yaml.safe_dump)
                if path.suffix == ".yaml"
                else (json.loads, json.dumps)
            )
            lines = content.split(b"\n")[:-1] if path.suffix == ".jsonl" else [content]
            at = random.randrange(len(lines))
            lines[at] = dump(mutated_tree(load(lines[at]), random)).encode()
            path.write_bytes(b"\n".join(lines) + b"\n" * (path.suffix == ".jsonl"))
            return
    path.write_bytes(mutated(content, random))


class TooLong(Exception):
    pass


@contextlib.contextmanager
def bounded():
    """Inside, time and memory end."""

    def stop(*_):
        raise TooLong(f"takes longer than {SECONDS} s")

    before = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    previous = signal.signal(signal.SIGALRM, stop)
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, before[1]))
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        resource.setrlimit(resource.RLIMIT_AS, before)
        signal.signal(signal.SIGALRM, previous)


@pytest.mark.slow
@pytest.mark.parametrize("name", READERS)
def test_any_file_gives_a_result_or_a_line(name, tmp_path):
    make, read, seal = READERS[name]
    original, folder = tmp_path / "original", tmp_path / "mutated"
    original.mkdir()
    make(original)
    files = sorted(path.relative_to(original) for path in original.rglob("*") if path.is_file())
    with (
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()),
        patch.object(os, "fsync", lambda descriptor: None),
    ):
        shutil.copytree(original, folder)
        read(folder)  # whole, it can be read
        shutil.rmtree(folder)
        refused = 0
        for seed in range(SEED, SEED + ROUNDS):
            chance = random.Random(f"{name} {seed}")
            shutil.copytree(original, folder)
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
                shutil.copytree(folder, tmp_path / f"failed-{seed}", dirs_exist_ok=True)
                raise AssertionError(
                    f"{name}, seed {seed}, {damaged}: {type(error).__name__}: {error}"
                ) from error
            shutil.rmtree(folder)
    assert refused or ROUNDS < 10


def escape_store(folder, way):
    index = json.loads((folder / "data/index.json").read_bytes())
    for suffix in ("bin", "doc"):
        (folder / f"data/00000.{suffix}").rename(folder / f"secret.{suffix}")
    index["shards"][0]["name"] = f"{way}secret"
    (folder / "data/index.json").write_text(json.dumps(index))


def escape_checkpoint(folder, way):
    checkpoint = folder / "checkpoints/step_00000003"
    (checkpoint / "rank_00000.safetensors").rename(folder / "checkpoints/secret")
    for path in (checkpoint / STATE, checkpoint / COMMIT):
        path.write_text(path.read_text().replace("rank_00000.safetensors", f"{way}secret"))


def escape_dataset(folder, way):
    """What a part's state names is moved into the store."""
    part = folder / "data/.progress/0-of-1"
    state = json.loads((part / "state.json").read_bytes())
    name = state["stores"]["train"]["shards"][0]["name"]
    for suffix in ("bin", "doc"):
        (part / f"train/{name}.{suffix}").rename(folder / f"secret.{suffix}")
    state["stores"]["train"]["shards"][0]["name"] = f"{way}secret"
    (part / "state.json").write_text(json.dumps(state))


@pytest.mark.slow
@pytest.mark.parametrize("absolute", [False, True])
@pytest.mark.parametrize(
    ("name", "escape"),
    [
        ("store", escape_store),
        ("checkpoint", escape_checkpoint),
        ("dataset", escape_dataset),
    ],
)
def test_no_index_leads_out_of_its_folder(name, escape, absolute, tmp_path):
    """The file that it names is there and whole, and it is refused."""
    make, read, seal = READERS[name]
    folder = tmp_path / "folder"
    folder.mkdir()
    make(folder)
    below = folder / "checkpoints" if name == "checkpoint" else folder
    escape(folder, f"{below}/" if absolute else "../")
    secrets = sorted(folder.rglob("secret*"))
    if seal:
        seal(folder)
    with pytest.raises(UserError):
        read(folder)
    assert all(path.exists() for path in secrets)
