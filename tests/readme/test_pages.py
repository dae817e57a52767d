"""Runs every command in README.md and docs/*.md as it is written.

This file tests all pages that do not need a fresh clone (test_readme.py) or a cluster (test_cluster_pages.py). Each
page gets a folder with the data and the run of a first training. A temporary folder replaces /fsx, and contains files
in the formats of other launchers. Programs of .venv are forked from a process that has already imported everything.
"""

import gzip
import importlib
import json
import re
import shlex
import shutil
from dataclasses import fields

import datasets
import numpy as np
import pyarrow
import pytest
from pyarrow import parquet
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from mamba_fsdp.__main__ import VERBS, page_of
from mamba_fsdp.data import tokenizer
from mamba_fsdp.errors import UserError
from mamba_fsdp.settings.resolve import as_dict, resolve_settings
from mamba_fsdp.verbs import plan
from tests.readme.pages import (
    IN_A_CLONE,
    ON_A_CLUSTER,
    PAGES,
    Shell,
    commands_to_run,
    text_of,
)
from tests.support.corpora import write_files
from tests.support.foreign_tokens import write_fms, write_layout
from tests.support.tiny import TINY, format_arguments

COMPOSER = """
model: {vocab_size: 65024, d_model: 2688, n_layer: 28, fsdp_layer_wrap: true, activation_checkpointing: true}
data:
  text_paths: [{path: /fsx/mamba-v1/book.train.gig.npy, weight: 0.6, order: 0}]
  code_paths: [{path: /fsx/mamba-v1/c.train.gig.npy, weight: 0.4, order: 0}]
  global_batch_size: 896
  micro_batch_size: 7
  eval_batch_size: 8
  seq_len: 4096
  n_total_tokens: 400039358022
  n_samples_to_skip: 0
optimizer: {lr: 0.00045, beta1: 0.9, beta2: 0.95, weight_decay: 0.1}
scheduler: {name: wsd, t_warmup: 1006878720tok, t_max: 10068787200tok, t_decay: 1006878720tok, alpha_f: 0.1}
fsdp: {sharding_strategy: FULL_SHARD, process_group: null, backward_prefetch: BACKWARD_PRE, verbose: true,
       activation_checkpointing_reentrant: true, activation_checkpointing: true, limit_all_gathers: false}
trainer:
  cp_interval: 1006878720tok
  eval_interval: 1006878720tok
  eval_subset_num_batches: 16
  save_folder: /fsx/checkpoints
  autoresume: true
general: {project_name: mamba-science, full_name: mambaoutai, window_size: 10, clipping_threshold: 1.0,
          position_weighting: true}
"""
SAVED_AS = ("tune.py", "windows.py")  # the file names under which the pages save Python code


def make_aws(fsx, random):
    rows = [random.integers(0, 50277, 256).tolist() for _ in range(40)]
    dataset = datasets.Dataset.from_dict({"input_ids": rows, "labels": rows})
    dataset.save_to_disk(str(fsx / "data/wikicorpus_llama2_7B_tokenized_4k"))


def documents_below(limit, random):
    return [random.integers(1, limit, random.integers(20, 200)) for _ in range(60)]


def make_fms(fsx, random):
    for name in ("lang=en/dataset=commoncrawl", "lang=en/dataset=arxiv"):
        write_fms(fsx / "data" / name / "shard.arrow", documents_below(500, random))
    words = {"<eos>": 0, **{f"w{n}": n for n in range(1, 500)}}
    theirs = Tokenizer(models.WordLevel(words, unk_token="<eos>"))
    theirs = PreTrainedTokenizerFast(tokenizer_object=theirs, eos_token="<eos>")
    theirs.save_pretrained(str(fsx / "tokenizer"))


def make_composer(fsx, random):
    (fsx / "mamba-v1").mkdir()
    for name in ("book", "c"):
        write_layout(fsx / f"mamba-v1/{name}.train.gig.npy", documents_below(65000, random))
    (fsx / "config.yaml").write_text(COMPOSER.replace("/fsx", str(fsx)))


def make_trainer(fsx, random):
    texts = [" ".join(f"word{n}" for n in random.integers(0, 80, 60)) for _ in range(80)]
    parquet.write_table(pyarrow.table({"text": texts}), fsx / "train.parquet")


def make_data(fsx, random):
    documents = [random.integers(0, 256, size).tolist() for size in random.integers(0, 200, 60)]
    write_fms(fsx / "data/code/lang=c/0.arrow", documents)
    rows = random.integers(0, 256, (100, 32)).tolist()
    datasets.Dataset.from_dict({"input_ids": rows}).save_to_disk(fsx / "data/blocks")
    files = {
        "openwebtext/train.bin": np.arange(5000, dtype="uint16").tobytes(),
        "openwebtext/val.bin": np.arange(5000, dtype="uint16").tobytes(),
        "texts/a.txt": "some text\n" * 2000,
        "twice.jsonl.gz": gzip.compress(gzip.compress(b"text")),
        "chats.jsonl": '{"messages": [{"role": "a", "content": null}]}\n',
        "lists.jsonl": '{"text": ["a", "b"]}\n',
        "half.jsonl": '{"text": "\\ud800"}\n',
    }
    write_files(fsx, files)
    shutil.make_archive(str(fsx / "texts"), "gztar", fsx / "texts")
    tokenizer.train(["some text"], 300).save(fsx / "tokenizers/mine")


# {page: function that makes the files in /fsx that its commands need}
FINDS = {
    "docs/data.md": make_data,
    "docs/from-aws.md": make_aws,
    "docs/from-composer.md": make_composer,
    "docs/from-fms.md": make_fms,
    "docs/from-trainer.md": make_trainer,
}
# {page: a file that its commands make, in the working directory or in /fsx}
LEAVES = {
    "docs/data.md": "data/blocks/train/index.json",
    "docs/evaluating.md": "numbers.json",
    "docs/from-aws.md": "mamba/exported/config.json",
    "docs/from-composer.md": "exported/config.json",
    "docs/from-fms.md": "exported/config.json",
    "docs/from-trainer.md": "exported/config.json",
    "docs/tuning.md": "runs/tuning/report.html",
    "docs/planning.md": "runs/profiled/profile/rank_0.json",
    "docs/watching.md": "runs/tracked/tensorboard",
}
# {part of a command: arguments to append}. The demo and its profile would take minutes, so the settings of a run that takes a
# second are appended. They also name another run folder, where necessary, because runs/demo must not change.
QUICK = TINY | {"vocab_size": 300, "num_steps": 8}
SHORTER = {
    "--tracker=tensorboard,wandb": format_arguments(QUICK | {"save_ckpt_path": "runs/tracked"}),
    "--use_profiler=true": format_arguments(QUICK),
    "--eval_prompts=": format_arguments(QUICK | {"save_ckpt_path": "runs/samples"}),
}


@pytest.fixture
def desk(user_folder, tmp_path):
    """Makes the folder in which the commands run. The folder contains links to the data and the run of `user_folder`.
    Other tests also read them, so they must not change."""
    for name in ("data/builtin", "runs/demo", "a.txt"):
        link = tmp_path / "desk" / name
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(user_folder / name)
    for name in ("a", "b"):
        (tmp_path / "desk/runs" / name).mkdir()
        (tmp_path / "desk/runs" / name / "train").symlink_to(user_folder / "runs/demo")
    (tmp_path / "fsx").mkdir()
    return tmp_path / "desk"


def pages_to_follow():
    """Returns the pages with commands that no other test file runs."""
    elsewhere = IN_A_CLONE + ON_A_CLUSTER
    return [page for page in PAGES if page not in elsewhere and commands_to_run(page)]


@pytest.mark.slow
@pytest.mark.parametrize("page", pages_to_follow())
def test_every_command_works(page, desk, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    fsx = desk.parent / "fsx"
    if page in FINDS:
        FINDS[page](fsx, np.random.default_rng(0))
    shell = Shell(desk)
    for command in commands_to_run(page):
        if command.language == "python":
            for name in SAVED_AS:
                (desk / name).write_text(command.text)
            continue
        text = command.text.replace("/fsx", str(fsx))
        for name in SAVED_AS:
            text = text.replace(f" {name}", f" {desk}/{name}")
        for setting, words in SHORTER.items():
            if setting in text:
                text = f"{text} {shlex.join(words)}"
        output = shell.run(text)
        if command.output:
            assert output == command.output
        if " training.py " in text and "The same command again resumes" in text_of(page):
            assert "finished   " in output
            assert "resumes    from" in shell.run(text)
    if page in LEAVES:
        assert (desk / LEAVES[page]).exists() or (fsx / LEAVES[page]).exists()


def options_of_verbs():
    """Returns the names of all options of the program."""
    names = {"config", "help"}
    for verb in VERBS:
        module = importlib.import_module(f"mamba_fsdp.verbs.{verb.replace('import', 'import_')}")
        for options in page_of(module).sections.values():
            names.update(field.name for field in fields(options))
    return names


@pytest.mark.parametrize("page", ["README.md", "docs/data.md"])
def test_the_options_that_a_page_names_exist(page):
    of_scripts = {"quick", "stack", "array"}
    named = set(re.findall(r"--(\w+)", text_of(page)))
    assert named <= options_of_verbs() | of_scripts


def rows():
    """Returns the rows of the tables in from-*.md: (an argument of another launcher, its equivalent here)."""
    pages = [text_of(page) for page in PAGES if page.startswith("docs/from-")]
    return re.findall(r"^\| `([^`]+)` \| (.*) \|$", "\n".join(pages), flags=re.M)


def parse_setting(code):
    """Returns {name: value} of a text of the form --name=value or name: value."""
    name, value = re.fullmatch(r"(?:--)?([\w.]+)(?:=|: )(.*)", code).groups()
    return {name: value}


@pytest.mark.parametrize("there, here", rows())
def test_a_row_of_a_page_is_true(there, here):
    if here.startswith("refused"):
        with pytest.raises(UserError):
            resolve_settings(parse_setting(there))
        return
    if there.isupper():
        return
    meant = {}
    for code in re.findall(r"`([^`]+[=:][^`]+)`", here.partition(";")[0]):
        if not code.startswith("get_dataset.py"):
            meant |= parse_setting(code)
    settings = resolve_settings(parse_setting(there))
    # Names of settings of other launchers imply a recipe with their optimizer, AdamW.
    ours = resolve_settings({"recipe": settings.optimizer.recipe, **meant})
    assert as_dict(settings) == as_dict(ours)
    assert bool(settings.explicit - {"recipe"}) != here.startswith("changes nothing")


def test_the_table_of_gpu_hours_is_what_plan_says(call):
    rows = re.findall(
        r"^\| (\d+) x (\S+) \| (.+?) \| (.+?) \| (.+?) \|$", text_of("docs/planning.md"), re.M
    )
    assert len(rows) == 6
    for nodes, instance, *figures in rows:
        words = ("mamba-2.8b", f"--nodes={nodes}", f"--instance={instance}", "--json")
        code, output = call(plan, *words)
        found = json.loads(output)
        hours = found["device_hours"]
        assert code == 0
        assert figures == [f"{found['days']:.2f}", f"{hours:,.0f}", f"{hours / 8:,.0f}"], instance
