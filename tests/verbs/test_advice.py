"""Tests the advice in error messages: each test makes a mistake, follows the advice in its message, and expects that the
result works."""

import datetime
import json
import re
import shutil
import subprocess
import sys

import numpy as np
import pyarrow.parquet
import pytest
import torch

from tests.support.corpora import write_files

# This program reads a command line from each line of stdin, a JSON string. It runs the command line as arguments of
# mamba-fsdp, and prints [exit code, output].
ANSWERS = """
import json, os, shlex, sys, tempfile, traceback
from mamba_fsdp.__main__ import main
answers = os.fdopen(os.dup(1), "w")
output = tempfile.TemporaryFile("w+")
for stream in (1, 2):
    os.dup2(output.fileno(), stream)
for line in sys.stdin:
    os.truncate(output.fileno(), 0)
    os.lseek(output.fileno(), 0, 0)
    sys.argv = ["mamba-fsdp", *shlex.split(json.loads(line))]
    code = 0
    try:
        main()
    except SystemExit as end:
        code = end.code
    except BaseException:
        code = -1
        traceback.print_exc()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    size = os.fstat(output.fileno()).st_size
    print(json.dumps([code, os.pread(output.fileno(), size, 0).decode()]), file=answers, flush=True)
"""
TRAIN = (
    "train --dry_run --vocab_size=320 --d_model=16 --n_layer=2 --d_state=4 --headdim=8 --seq_length=32 --batch_size=2 "
    "--kernels=reference --num_steps=9"
)
MINE = f"{TRAIN} --dataset_path=data/builtin"
IDS = "--tokenizer=none --pack=none"
FREE = TRAIN.replace("--vocab_size=320 ", "")
SHAPE = "--vocab_size=320 --d_model=16 --n_layer=2 --d_state=4 --headdim=8"
# These arguments contain no sizes of the model, so the model gets the shape of the existing weights.
RESHAPED = f"{TRAIN.replace(SHAPE, '')} --dataset_path=data/builtin"
# The settings of runs/demo.
DEMO = (
    "train --dry_run --dataset_path=data/builtin --d_model=16 --n_layer=2 --vocab_size=300 --d_state=4 --seq_length=32 "
    "--batch_size=2 --num_steps=9 --kernels=reference"
)
PREPARED = [
    "tokenize texts made",
    "tokenize texts parts --part=0/2",
    "tokenize texts other --tokenizer=train:280",
    "tokenize texts large --tokenizer=train:500",
    f"tokenize ids.jsonl noend --text_column=ids {IDS} --vocab_size=400 --validation_fraction=0",
]
# These tests do not follow advice that needs Slurm, GPUs, several ranks, the Hub, other packages, a full or failing disk, or files
# that are copied or downloaded again. tests/slurm and tests/launch cover the messages of the launcher, doctor and preflight.
#
# {a command line with a mistake: (a regular expression for the advice in its message, the steps that follow the advice)}. A step
# can contain groups of the expression. It is a command line, or arguments to add to the command line with the mistake.
FOLLOWED = {
    # get_dataset.py
    "tokenize b.txt out": (r"did you mean (\S+)\?", "tokenize {0} out"),
    "tokenize data/builtin/../../texts/* ": ("give (OUT) too", "+ out"),
    "tokenize texts texts": ("choose another folder", "tokenize texts out"),
    "tokenize notes out": ("(--format=text) ", "+ {0}"),
    "tokenize texts out --splits=official": ("without this option", "tokenize texts out"),
    "tokenize texts out --documents=pages": (
        "write file, (lines), ",
        "tokenize texts out --documents={0}",
    ),
    "tokenize texts out --part=2/2": (r"are (\d/4) to", "tokenize texts out --part={0}"),
    "tokenize texts made --documents=lines": ("give (--overwrite)", "+ {0}"),
    "tokenize texts out --tokenizer=train:9": (
        r"such as (train:\d+)",
        "tokenize texts out --tokenizer={0}",
    ),
    "tokenize ids.jsonl out --text_column=ids": (
        "give (--tokenizer=none)",
        "+ {0} --pack=none --vocab_size=400",
    ),
    f"tokenize ids.jsonl out --text_column=ids {IDS}": ("give (--vocab_size=)N", "+ {0}400"),
    "tokenize ids.jsonl out --text_column=ids --tokenizer=none": (
        r"as in (--eos_token=\d)",
        "+ {0} --vocab_size=400",
    ),
    f"tokenize ids.jsonl out --text_column=ids {IDS} --vocab_size=9": (
        "with (--tokenizer)",
        "tokenize ids.jsonl out --text_column=ids --validation_fraction=0 {0}=large",
    ),
    f"tokenize ids.jsonl out {IDS} --vocab_size=9": (
        "(--text_column=ids)",
        "+ {0} --vocab_size=400",
    ),
    "tokenize rows.jsonl out": (r"give (--text_column=\S+)", "+ {0}"),
    "tokenize words.csv out": ("give (--text_column=words)", "+ {0}"),
    "tokenize carets.csv out": ("with (--delimiter)", "+ {0}=^"),
    "tokenize carets.csv out --delimiter=,,": (r"as in (--\S+)", "tokenize carets.csv out {0}"),
    "tokenize short.txt out": ("with (--overwrite --validation_fraction=0)", "+ {0}"),
    "tokenize texts out --tokenizer=data/builtin/train/tokenizer/tokenizer.json": (
        "with (--eos_token)",
        "+ {0}='<|endoftext|>'",
    ),
    "tokenize arch.tar.gz out": (
        'see "Unpack archives and fetch pointers" in (docs/data.md)',
        "! tar xf arch.tar.gz -C unpacked",
        "tokenize unpacked out",
    ),
    "tokenize latin.txt out --validation_fraction=0": ("(--encoding=cp1252) would", "+ {0}"),
    "tokenize wide.txt out --validation_fraction=0": ("(--encoding=utf-16-le) reads", "+ {0}"),
    "tokenize latin.txt out --encoding=latin9000": (
        "as in (--encoding=cp1252)",
        "+ {0} --validation_fraction=0",
    ),
    "tokenize torn.jsonl out": ("(--skip_unreadable=true) skips", "+ {0} --validation_fraction=0"),
    "tokenize sets out": ("other files with (--skip_unreadable=true)", "+ {0}"),
    "tokenize unnamed.json out": (r"(--format=\S+) reads it", "+ {0}"),
    "tokenize array.npy out": ("give (--tokenizer=none)", "+ {0} --pack=none --vocab_size=400"),
    "tokenize data/builtin out": (r"(--dataset_path=\S+);", f"{TRAIN} {{0}}"),
    "tokenize texts out --tokenizer=texts": (
        "not (a tokenizer)",
        "tokenize texts out --tokenizer=runs/demo",
    ),
    "tokenize texts out --overwrite --part=0/2": (
        "remove OUT by hand",
        "tokenize texts out --part=0/2",
    ),
    # training
    f"{TRAIN} --dataset_path=parts": (
        "(command) that began it resumes it",
        "tokenize texts parts --part=1/2",
        "inspect parts",
    ),
    f"{MINE} --learing_rate=1": (r"did you mean (\w+)\?", f"{MINE} --{{0}}=1"),
    f"{MINE} --num_epochs=1": ("give one", f"{MINE.replace('--num_steps=9', '')} --num_epochs=1"),
    f"{MINE} --wandb_project=a": (r"without (tracker=wandb); leave it out", MINE),
    f"{MINE} --global_batch_size=3": (
        r"set global_batch_size=(\d+)",
        f"{MINE} --global_batch_size={{0}}",
    ),
    f"{MINE} --gradient_accumulation_steps=2 --global_batch_size=4": (
        "give one of them",
        f"{MINE} --global_batch_size=4",
    ),
    f"{MINE} --seq_length=20000": ("or (a smaller seq_length)", f"{MINE} --seq_length=64"),
    f"{TRAIN} --dataset_path=data": (
        r"with (--dataset_path=\S+ --datasets=\S+);",
        f"{TRAIN} {{0}}",
    ),
    f"{TRAIN} --dataset_path=data --datasets=builtin,builtin": (
        "list each dataset once",
        f"{TRAIN} --dataset_path=data --datasets=builtin",
    ),
    f"{TRAIN} --dataset_path=data --datasets=builtin --weights=1,2": (
        "give one weight for each dataset",
        f"{TRAIN} --dataset_path=data --datasets=builtin --weights=1",
    ),
    f"{TRAIN} --dataset_path=data --datasets=bultin": (
        r"did you mean (\w+)\?",
        f"{TRAIN} --dataset_path=data --datasets={{0}}",
    ),
    f"{TRAIN} --dataset_path=texts": (
        r"make one from it: (.*) OUT",
        "{0} out",
        f"{FREE} --dataset_path=out",
    ),
    f"{TRAIN} --dataset_path=nope/x": (
        r"there: (.*)",
        "tokenize texts nope/x",
        f"{FREE} --dataset_path=nope/x",
    ),
    f"{TRAIN} --dataset_path=noend --reset_at_documents=true": (
        "again with (--eos_token)=ID",
        "tokenize ids.jsonl out --text_column=ids --tokenizer=none --vocab_size=400 {0}=0",
        f"{TRAIN.replace('320', '400')} --seq_length=2 --dataset_path=out --reset_at_documents=true",
    ),
    f"{TRAIN} --dataset_path=two --datasets=a,b": ("give (--allow_other_tokenizer=true)", "+ {0}"),
    f"{MINE} --validation_path=other/train": (
        r"both \(get_dataset.py (--tokenizer)",
        "tokenize texts out {0}=data/builtin/train/tokenizer",
        f"{MINE} --validation_path=out/train",
    ),
    f"{MINE} --save_ckpt_path=texts": ("name a new folder", f"{MINE} --save_ckpt_path=new"),
    f"{DEMO} --load_ckpt_path=runs/demo --init_from=runs/demo": (
        "give one",
        f"{DEMO} --load_ckpt_path=runs/demo",
    ),
    f"{MINE} --resuming_dataset=true": (
        "needs (load_ckpt_path)",
        f"{DEMO} --resuming_dataset=true --{{0}}=runs/demo",
    ),
    f"{MINE} --init_from=runs/demo": (
        "(--?init_from|init_from)",
        f"{RESHAPED} --init_from=runs/demo",
    ),
    f"{RESHAPED} --init_from=exported": (
        r"name one, as in (\S+)|(not a model)",
        f"{RESHAPED} --init_from=exported/demo",
    ),
    f"{RESHAPED} --init_from=runs": (r"name one, as in (\S+)", f"{RESHAPED} --init_from={{0}}"),
    f"{RESHAPED} --load_ckpt_path=exported/demo": (
        r"(init_from=\S+) takes its weights",
        f"{RESHAPED} --{{0}}",
    ),
    f"{RESHAPED} --init_from=runs/demo/checkpoints/step_00000001": (
        r"the newest: (\S+)",
        f"{RESHAPED} --init_from={{0}}",
    ),
    f"{RESHAPED} --init_from=runs/demo/config.yaml": (
        r"name (\S+)",
        f"{RESHAPED} --init_from={{0}}",
    ),
    f"{DEMO} --load_ckpt_path=runs/demo --optimizer=adamw": (
        r"(init_from=\S+)",
        f"{RESHAPED} --optimizer=adamw --{{0}}",
    ),
    f"{DEMO} --resuming_dataset=true --load_ckpt_path=runs/demo --seq_length=16": (
        r"set (seq_length=\d+)",
        f"{DEMO} --resuming_dataset=true --load_ckpt_path=runs/demo --{{0}}",
    ),
    f"{MINE} --layers=mamba2 --headdim=7": (
        "set another headdim",
        f"{MINE} --layers=mamba2 --headdim=16",
    ),
    f"{MINE} --layers=mamba9": (r"as in (\S+)", f"{MINE} --layers={{0}} --n_layer=10 --headdim=16"),
    f"{MINE} --kernels=scan=fats": (
        r"did you mean (\w+)\?|(reference)",
        f"{MINE} --kernels=scan=reference",
    ),
    f"{MINE} --kernels=ssd=reference": ("only (conv)", f"{MINE} --kernels={{0}}=reference"),
    f"{MINE} --fsdp_activation_checkpointing=true --selective_checkpointing=2": (
        r"as in (1/3)",
        f"{MINE} --fsdp_activation_checkpointing=true --selective_checkpointing={{0}}",
    ),
    "train --dry_run --config=runs/demo": (
        "path of a YAML file in it",
        "train --dry_run --config=runs/demo/config.yaml",
    ),
    f"{MINE} --config=mamba_130m": (r"use --config=(\S+) for this run", f"{MINE} --config={{0}}"),
    f"{MINE} --eval_prompts=a --validation_path=none": (
        "(name a validation_path)|(leave it out)",
        f"{MINE} --eval_prompts=a --validation_path=data/builtin/validation",
    ),
    f"{MINE} stray": ("written (--name=value)", MINE),
    f"{MINE} --schedule=polynomal": (r"one of .*(polynomial)", f"{MINE} --schedule={{0}}"),
    f"{MINE} --context_parallel=2": (r"(change) one of them", MINE),
    f"{MINE} --sharding_strategy=nope": (r"one of .*(fsdp)", f"{MINE} --sharding_strategy={{0}}"),
    f"{MINE} --save_interval=10ep": (r"as in (100ba)", f"{MINE} --save_interval={{0}}"),
    f"{MINE} --load_path=a": (
        "(init_from)=FILE",
        f"{RESHAPED} --{{0}}=runs/demo/pth/step_00000004/consolidated.00.pth",
    ),
    f"{MINE} --scheduler.name=polynomial_with_warmup": ("(schedule=polynomial)", f"{MINE} --{{0}}"),
    "train --dry_run --dataset_path=data/builtin --model_name=mamba2-130m --n_layer=2 --batch_size=4": (
        r"64 passes of 4 samples, .*: (--global_batch_size=\d+) takes one",
        "+ {0}",
    ),
    f"{DEMO.replace('=9', '=90000')}": (
        r"or (num_epochs=\d+)",
        f"{DEMO.replace('--num_steps=9', '--{0}')}",
    ),
    f"{MINE.replace('320', '4000')}": (
        r"set (vocab_size=\d+)",
        f"{FREE} --dataset_path=data/builtin --{{0}}",
    ),
    f"{MINE.replace('320', '200')}": (
        r"set (vocab_size=\d+)",
        f"{FREE} --dataset_path=data/builtin --{{0}}",
    ),
    f"{MINE} --batch_size=0": (r"at least (\d)", f"{MINE} --batch_size={{0}}"),
    f"{MINE} --keep_every=often": (
        r"as in (\w+) or (\w+), .* as in (\w+)",
        f"{MINE} --keep_every={{0}} --checkpoint_interval={{1}} --eval_interval={{2}}",
    ),
    f"{MINE} --training.seed=1 --seed=2": ("give it once", f"{MINE} --seed=2"),
    f"{MINE} --load_ckpt_path=runs/demo": (
        "leave out the settings that differ",
        f"{RESHAPED} --load_ckpt_path=runs/demo",
    ),
    f"{TRAIN} --use_dummy_dataset=true --num_epochs=1".replace("--num_steps=9", ""): (
        "give (num_steps)",
        f"{TRAIN} --use_dummy_dataset=true --{{0}}=2",
    ),
    f"{MINE} --config=flat.yaml": (
        "put its settings below it",
        "! printf 'training:\\n  seed: 3\\n' > flat.yaml",
        f"{MINE} --config=flat.yaml",
    ),
    f"{MINE} --min_lr=0.1": ("use (min_learning_rate_ratio)", f"{MINE} --{{0}}=0.1"),
    f"{MINE} --gpus=2": ("trains on all GPUs, or (on the CPU)", MINE),
    # models
    "evaluate runs/demo texts": (
        r"from it: (.*) OUT (.*); then (evaluate) OUT/train",
        "{0} out {1}",
        "evaluate runs/demo out/train --limit=2",
    ),
    "evaluate runs/demo data": (r"as in (\S+)", "evaluate runs/demo {0} --limit=2"),
    "evaluate runs/demo data/builtin --seq_length=8 --stride=9": (
        r"longer than (--seq_length=8)",
        "evaluate runs/demo data/builtin --limit=2 --seq_length=8 --stride=8",
    ),
    "evaluate runs/demo other/train": (r"give (--allow_other_tokenizer=true)", "+ {0} --limit=2"),
    "evaluate runs/demo large/train --allow_other_tokenizer=true": (
        r"tokenizer: (.*) INPUT OUT (\S+)",
        "{0} texts out {1}",
        "evaluate runs/demo out/train --limit=2",
    ),
    "generate runs/notok --prompt=def --length=2": (
        r"give one with (--tokenizer)=PATH",
        "+ {0}=runs/demo",
    ),
    "generate runs": (r"as in (\S+)", "generate {0} --prompt=def --length=2"),
    "generate bare/consolidated.00.pth --prompt=def --length=2": (
        r"; (\S+ inspect \S+) lists",
        "{0}",
    ),
    "generate runs/demo/checkpoints/step_00000004/rank_00000.safetensors": (
        r"name (?:the checkpoint instead: )?(\S+)",
        "generate {0} --prompt=def --length=2",
    ),
    "export runs/demo exported/demo": ("name (a new folder)", "export runs/demo out"),
    "export runs/demo/checkpoints/step_00000001 out": (
        r"has step_\d+, (step_\d+);",
        "export runs/demo/checkpoints/{0} out",
    ),
    "export pickled.pth out": (
        r"only its tensors: (.*)",
        "! {0}",
        "inspect pickled.pth.weights.pth",
    ),
    "inspect exported/demo --verify": (
        "--verify accepts only (token stores), checkpoints and runs",
        "inspect data/builtin --verify",
    ),
    "inspect runs/dem": (r"did you mean (\w+)\?", "inspect runs/{0}"),
    "report runs": (r"; (.*) shows them", "{0}"),
    "report runs/demo/config.yaml": (r"name (\S+)", "report {0}"),
    "checkpoints runs": (r"as in (\S+)", "checkpoints {0}"),
    "plan data/builtin --instance=p4d.24xlarge": ("add a time, as in (--hours=8)", "+ {0}"),
    "plan mamba-130m --hours=8": (
        r"data/mine (\S+)",
        "plan data/builtin {0} --hours=8 --instance=p4d.24xlarge",
    ),
    "plan mamba-130m --instance=p4d.24xlarg": (
        r"did you mean (\S+)\?",
        "plan mamba-130m --instance={0}",
    ),
    "plan mamba-130m --peak=100": (r"add (--instance)=NAME", "+ {0}=p4d.24xlarge"),
    "plan runs/demo": (r"(--config=\S+)", "plan {0} --instance=p4d.24xlarge"),
    "sample runs/demo --prompt=def --length=2": (
        r"did you mean (\w+)\?",
        "{0} runs/demo --prompt=def --length=2",
    ),
    "generate runs/demo --promt=def": (
        r"did you mean (--\w+)\?",
        "generate runs/demo {0}=def --length=2",
    ),
    "train --help=warmpu": (r"did you mean (--help=\w+)\?", "train {0}"),
}


@pytest.fixture(scope="module")
def folder(user_folder, tmp_path_factory):
    """Makes a copy of the user's folder, with the files that the mistakes need."""
    folder = tmp_path_factory.mktemp("advice") / "user"
    shutil.copytree(user_folder, folder)
    text = (folder / "a.txt").read_text()
    files = {
        "texts/a.txt": text,
        "notes": text,
        "sets/a-1-of-2.txt": text,
        "sets/b.txt": text,
        "short.txt": "a",
        "ids.jsonl": '{"ids": [5, 6, 300]}\n{"ids": [7, 8]}\n' * 1200,
        "rows.jsonl": '{"document": {"text": "some text"}}\n' * 1200,
        "words.csv": "id,words\n" + "1,some text\n" * 1200,
        "carets.csv": "id^text\n" + "1^some text\n" * 1200,
        "flat.yaml": "training: 5\n",
        "latin.txt": "by José and Renée".encode("cp1252"),
        "wide.txt": "by José and Renée".encode("utf-16-le"),
        "torn.jsonl": '{"text": "some text"}\n' * 99 + "{",
    }
    write_files(folder, files)
    (folder / "unpacked").mkdir()
    rows = pyarrow.Table.from_pylist([{"text": "some text"}] * 1200)
    pyarrow.parquet.write_table(rows, folder / "unnamed.json")
    np.save(folder / "array.npy", np.arange(9000) % 300)
    shutil.copytree(folder / "runs/demo", folder / "runs/notok")
    shutil.rmtree(folder / "runs/notok/tokenizer")
    (folder / "bare").mkdir()
    shutil.copy(folder / "runs/demo/pth/step_00000004/consolidated.00.pth", folder / "bare")
    torch.save({"w": torch.zeros(2), "when": datetime.date(2026, 1, 1)}, folder / "pickled.pth")
    subprocess.run(["tar", "czf", "arch.tar.gz", "texts"], cwd=folder, check=True)
    return folder


@pytest.fixture(scope="module")
def answers(folder, project):
    """Returns a function answers(command line) that runs the command line, and returns (exit code, output)."""
    environment = {
        "PYTHONPATH": str(project),
        "PATH": "/usr/bin:/bin",
        "COLUMNS": "80",
        "HF_HUB_OFFLINE": "1",
    }
    program = subprocess.Popen(
        [sys.executable, "-c", ANSWERS],
        cwd=folder,
        env=environment,
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )

    def answer(line):
        print(json.dumps(line), file=program.stdin, flush=True)
        return json.loads(program.stdout.readline())

    for line in PREPARED:
        code, output = answer(line)
        assert code == 0, output
    (folder / "two").mkdir()
    (folder / "two/a").symlink_to(folder / "data/builtin/train")
    (folder / "two/b").symlink_to(folder / "other/train")
    yield answer
    program.stdin.close()
    program.wait(60)


def follow(step, mistake, folder, answers):
    """Runs a step, and returns (exit code, output). A step that begins with ! is a shell command, and one that begins
    with + has arguments to append to the mistake. All others are command lines."""
    if step.startswith("! "):
        done = subprocess.run(step[2:], shell=True, cwd=folder, capture_output=True, text=True)
        return done.returncode, done.stderr
    if step.startswith("+ "):
        step = f"{mistake} {step[2:]}"
    step = re.sub(r"^\S*/python \S*get_dataset.py", "tokenize", step)
    step = re.sub(r"^\S*/mamba-fsdp ", "", step)
    return answers(step)


@pytest.mark.parametrize("mistake", FOLLOWED)
def test_following_the_advice_of_an_error_works(folder, answers, mistake):
    shutil.rmtree(folder / "out", ignore_errors=True)
    pattern, *steps = FOLLOWED[mistake]
    code, output = answers(mistake)
    found = re.search(pattern, output)
    assert found and re.search("error: |warning ", output), output
    for step in steps:
        code, output = follow(step.format(*found.groups()), mistake, folder, answers)
        assert code == 0, (step, output)


# {arguments with names that other programs use: the settings that these names mean}
TYPED = {
    "--steps=3 --bs=2 --lr=0.1": "num_steps batch_size learning_rate",
    "--max_seq_len=16 --wd=0 --warmup=2": "seq_length weight_decay warmup_steps",
    "--epochs=3 --save_every=2 --log_every=1": "num_epochs checkpoint_interval report_interval",
    "--n_layers=2 --dim=16 --dtype=float32": "n_layer d_model mixed_precision",
}


def test_common_spellings_become_the_intended_setting(answers):
    for words, settings in TYPED.items():
        code, output = answers(f"train --dry_run --dataset_path=data/builtin {words}")
        assert code == 0, output
        for name in settings.split():
            assert f" is {name}=" in output


def test_the_vocabulary_is_that_of_the_data_and_stays_in_the_run(answers, folder):
    """Without a vocab_size, the model of a run has the size of the vocabulary in the data, also in the default run
    folder and after the run is resumed."""
    begin = f"{FREE.replace('--dry_run', '')} --dataset_path=data/builtin --num_steps="
    for steps in (1, 2):
        code, output = answers(
            f"{begin.replace('--num_steps=9', '')}{steps}".replace("--num_steps=9", "")
        )
        assert code == 0, output
    assert "resumes    from runs/train" in output
    assert "vocab_size: 300\n" in (folder / "runs/train/config.yaml").read_text()
    code, output = answers(f"{FREE} --dataset_path=large --save_ckpt_path=runs/large")
    assert code == 0 and re.search(
        "vocab_size=[0-9]+, the size in the data, instead of 4096", output
    )
