"""docs/from-*.md are true: each is followed word by word on data and files as the other launcher has them, on a CPU."""

import json
import os
import re
import subprocess
import sys

import numpy as np
import pytest

from config import pages
from config.elsewhere import LAUNCHERS, names
from config.resolve import aliases, resolve_settings

COMPOSER = """
model: {vocab_size: 65024, d_model: 2688, n_layer: 28, fsdp_layer_wrap: true, activation_checkpointing: true}
data:
  {global_batch_size: 896, micro_batch_size: 7, eval_batch_size: 8, seq_len: 4096, num_workers: 2, prefetch_factor: 2,
   n_total_tokens: 400039358022, n_samples_to_skip: 0, code_percentage: 0.4, text_percentage: 0.6,
   text_paths: [{path: /fsx/mamba-v1/book.train.gig.npy, weight: 0.6, order: 0}],
   code_paths: [{path: /fsx/mamba-v1/c.train.gig.npy, weight: 0.4, order: 0}]}
optimizer: {lr: 0.00045, beta1: 0.9, beta2: 0.95, weight_decay: 0.1}
scheduler: {name: wsd, t_warmup: 1006878720tok, t_max: 10068787200tok, t_decay: 1006878720tok, alpha_f: 0.1}
fsdp: {sharding_strategy: FULL_SHARD, process_group: null, backward_prefetch: BACKWARD_PRE, verbose: true,
       activation_checkpointing_reentrant: true, activation_checkpointing: true, limit_all_gathers: false}
trainer: {cp_interval: 1006878720tok, eval_interval: 1006878720tok, save_interval: 1006878720tok,
          eval_subset_num_batches: 16, save_folder: /fsx/checkpoints, auto_log_hparams: true, autoresume: true}
general: {project_name: mamba-science, full_name: mambaoutai, window_size: 10, clipping_threshold: 1.0,
          position_weighting: true}
"""
TRAINER = """
model: {d_model: 768, n_layer: 24, vocab_size: 50280, d_state: 16, d_conv: 4, expand: 2, dt_rank: auto, rms_norm: true}
data: {dataset_name: Salesforce/wikitext, max_seq_length: 2048, train_batch_size: 4, dataloader_num_workers: 4}
training: {output_dir: ./outputs, run_name: mine, num_train_epochs: 5, max_steps: -1, per_device_train_batch_size: 4,
           gradient_accumulation_steps: 8, learning_rate: 5.0e-4, adam_beta2: 0.95, lr_scheduler_type: cosine,
           warmup_steps: 1000, fp16: false, bf16: true, gradient_checkpointing: true, optim: adamw_torch,
           eval_strategy: steps, eval_steps: 1000, save_steps: 2000, logging_steps: 100,
           report_to: [tensorboard, wandb], seed: 42}
wandb: {project: mamba-wikitext103, entity: null}
use_wandb: true
train_from_scratch: true
"""
SCRIPT = """#!/bin/bash
#SBATCH --nodes=4 # number of nodes
GPUS_PER_NODE=8 # 4 for G5.12x
: "${{DATA_PATH:=/fsx}}"
declare -a TORCHRUN_ARGS=(
    --nproc_per_node=$GPUS_PER_NODE \\
    --rdzv_endpoint=$(hostname) \\
)
declare -a MODEL_ARGS=(
    {0}
)
srun -l torchrun "${{TORCHRUN_ARGS[@]}}" $TRAIN_SCRIPT "${{MODEL_ARGS[@]}}"
"""


def commands(launcher):
    blocks = re.findall(r"^```sh\n(.*?)^```", (pages.DOCS / f"from-{launcher}.md").read_text(), flags=re.M | re.S)
    return [line for block in blocks for line in block.splitlines()]


def script(launcher):
    """Their script with the words of the page's first training command."""
    line = next(line for line in commands(launcher) if "training.py" in line)
    return SCRIPT.format("\n    ".join(word for word in line.split() if word.startswith("--")))


def make_aws(fsx, random):
    datasets = pytest.importorskip("datasets")
    rows = [random.integers(0, 50277, 256).tolist() for _ in range(40)]
    datasets.Dataset.from_dict({"input_ids": rows, "attention_mask": [[1] * 256] * 40, "labels": rows}).save_to_disk(
        str(fsx / "data/wikicorpus_llama2_7B_tokenized_4k"))
    (fsx / "01.train.sbatch").write_text(script("aws"))


def make_fms(fsx, random):
    import pyarrow as pa
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    schema = pa.schema([pa.field("tokens", pa.uint32())])
    counts = "dataset/filename,documents,tokens\n"
    for name in ("lang=en/dataset=commoncrawl", "lang=en/dataset=arxiv"):
        (fsx / "data" / name).mkdir(parents=True)
        documents = [random.integers(1, 500, random.integers(20, 200)) for _ in range(60)]
        with pa.ipc.new_file(str(fsx / "data" / name / "shard.arrow"), schema) as writer:
            for document in documents:
                writer.write(pa.record_batch([pa.array(document, pa.uint32())], schema))
        counts += f"/{name}/shard.arrow,{len(documents)},{sum(map(len, documents))}\n"
    (fsx / "data/meta").mkdir()
    (fsx / "data/meta/combined_counts.csv").write_text(counts)
    words = Tokenizer(models.WordLevel({"<eos>": 0, **{f"w{n}": n for n in range(1, 500)}}, unk_token="<eos>"))
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<eos>").save_pretrained(str(fsx / "tokenizer"))
    (fsx / "train.sh").write_text(script("fms"))


def make_composer(fsx, random):
    (fsx / "mamba-v1").mkdir()
    for name in ("book", "c"):
        lengths = random.integers(50, 300, 60)
        position = np.concatenate([np.arange(length) for length in lengths]).astype(np.int32)
        entries = random.integers(0, 65000, position.size).astype(np.int32) | position << 16 | 1 << 30
        path = fsx / f"mamba-v1/{name}.train.gig.npy"
        entries.astype("<i4").tofile(path)
        path.with_name(f"{path.name}.size").write_text(f"{entries.size}\n")
    (fsx / "config.yaml").write_text(COMPOSER.replace("/fsx", str(fsx)))


def make_trainer(fsx, random):
    import pyarrow as pa
    import pyarrow.parquet as pq

    texts = [" ".join(f"word{n}" for n in random.integers(0, 80, 60)) for _ in range(300)]
    pq.write_table(pa.table({"text": texts}), fsx / "train.parquet")
    (fsx / "mamba_130m.yaml").write_text(TRAINER)


MAKE = {"aws": make_aws, "fms": make_fms, "composer": make_composer, "trainer": make_trainer}


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_page_is_followed(launcher, project, tmp_path):
    MAKE[launcher](tmp_path, np.random.default_rng(0))
    said, tiny = [], ""
    for command in commands(launcher):
        if command.startswith("TINY="):
            tiny = command
            continue
        command = command.replace("/fsx", str(tmp_path)).replace(".venv/bin/python", sys.executable)
        done = subprocess.run(f"{tiny}; {command}", shell=True, cwd=project, capture_output=True, text=True,
                              env=os.environ | {"OMP_NUM_THREADS": "1"})
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        said.append(done.stdout)
        if "--from=" in command and ">" not in command:
            (tmp_path / "written.yaml").write_text(done.stdout)
            resolve_settings({}, str(tmp_path / "written.yaml"))
    first, again = [text for text in said if "model      " in text]
    assert "finished   " in first and ("settings   " in first or launcher in ("aws", "composer"))
    assert "resumes    from" in again and "over       " in again
    (exported,) = [json.loads(file.read_text()) for file in tmp_path.rglob("exported/config.json")]
    assert exported["hidden_size"] == 32


def test_the_pages_are_up_to_date():
    for launcher in LAUNCHERS:
        page = (pages.DOCS / f"from-{launcher}.md").read_text()
        assert page == pages.page(launcher), f"docs/from-{launcher}.md: run python -m config.pages"


def test_the_pages_name_settings_that_there_are():
    for launcher in LAUNCHERS:
        above = (pages.DOCS / f"from-{launcher}.md").read_text().partition(pages.MARK)[0]
        named = set(re.findall(r"`--(\w+)", above)) - {"config", "flag", "resume"}
        unknown = {name for name in named if name not in aliases() and name not in names()}
        assert not unknown
