"""docs/from-*.md are true: each is followed word by word on data and files as the other launcher
has them, on a CPU."""

import json
import os
import re
import shlex
import subprocess
from pathlib import Path

import datasets
import numpy as np
import pyarrow
import pytest
from pyarrow import parquet
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from config.resolve import as_dict, resolve_settings
from mamba_fsdp.errors import UserError
from tests.support.forked import Training
from tests.support.others_tokens import write_fms, write_layout

LAUNCHERS = ["aws", "fms", "composer", "trainer"]
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
    texts = [" ".join(f"word{n}" for n in random.integers(0, 80, 60)) for _ in range(300)]
    parquet.write_table(pyarrow.table({"text": texts}), fsx / "train.parquet")


MAKE = {"aws": make_aws, "fms": make_fms, "composer": make_composer, "trainer": make_trainer}


@pytest.mark.slow
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_page_is_followed(launcher, project, tmp_path):
    MAKE[launcher](tmp_path, np.random.default_rng(0))
    page = (DOCS / f"from-{launcher}.md").read_text()
    (block,) = re.findall(r"^```sh\n(.*?)^```", page, flags=re.M | re.S)
    tiny, *commands = block.replace("/fsx", str(tmp_path)).splitlines()
    (tiny,) = re.findall('TINY="(.*)"', tiny)
    for command in commands:
        times = 2 if "training.py" in command else 1
        said = [run(command.replace("$TINY", tiny), project) for _ in range(times)]
        if times == 2:
            assert "finished   " in said[0] and "resumes    from" in said[1]
    (exported,) = [json.loads(file.read_text()) for file in tmp_path.rglob("exported/config.json")]
    assert exported["hidden_size"] == 32


def run(command, project):
    if not command.startswith(".venv/bin/python "):
        return subprocess.run(command, shell=True, cwd=project, check=True)
    _, *words = shlex.split(command)
    count = 2 if words[0] == "-m" else 1
    process = Training(words[count:], dict(os.environ), merged=True, program=words[:count])
    said, _ = process.communicate(timeout=800)
    assert process.returncode == 0, f"{command}\n{said}"
    return said


DOCS = Path(__file__).resolve().parents[2] / "docs"
ROWS = [
    row
    for launcher in LAUNCHERS
    for row in re.findall(
        r"^\| `([^`]+)` \| (.*) \|$", (DOCS / f"from-{launcher}.md").read_text(), flags=re.M
    )
]


def words(code):
    """{name: value} of --name=value or name: value."""
    name, value = re.fullmatch(r"(?:--)?([\w.]+)(?:=|: )(.*)", code).groups()
    return {name: value}


@pytest.mark.parametrize("there, here", ROWS)
def test_a_row_of_a_page_is_true(there, here):
    if here.startswith("refused"):
        with pytest.raises(UserError):
            resolve_settings(words(there))
        return
    if there.isupper():
        return
    meant = {}
    for code in re.findall(r"`([^`]+[=:][^`]+)`", here.partition(";")[0]):
        if not code.startswith("get_dataset.py"):
            meant |= words(code)
    settings, explicit = resolve_settings(words(there))
    ours, _ = resolve_settings(meant)
    assert as_dict(settings) == as_dict(ours)
    assert bool(explicit) != here.startswith("changes nothing")
