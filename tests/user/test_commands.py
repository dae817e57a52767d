"""Tests the commands of a user on the pinned stack: tokenize, train, stop, resume, and use the trained model.

tests/readme runs the commands of README.md and docs/ on the newest stack. In this file, each command runs in a process
that is forked from one that has already imported everything. This saves the seconds of the imports.
"""

import signal

import pytest

from mamba_fsdp.run import records
from tests.support import forked
from tests.support.processes import wait_until
from tests.support.projects import MANY_STEPS

pytestmark = [pytest.mark.slow, pytest.mark.pinned]


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """Makes the user's folder, with the token store data/texts, whose tokenizer is trained on its texts."""
    folder = tmp_path_factory.mktemp("home")
    (folder / "texts").mkdir()
    for name in range(4):
        lines = [f"def f_{name}_{number}(x): return {number} * x\n" for number in range(500)]
        (folder / "texts" / f"{name}.txt").write_text("".join(lines))
    command = "get_dataset.py texts data/texts --tokenizer=train:300 --validation_fraction=0.1"
    forked.run(command, folder)
    return folder


@pytest.fixture
def enter(home):
    """Returns a function enter(command) that runs a command in the user's folder, and returns its output."""
    return lambda command: forked.run(command, home)


def losses(run):
    """Returns [(step, loss)] in the order in which the steps were recorded."""
    entries = records.read_entries(run / "metrics.jsonl")
    return [(entry["step"], entry["loss"]) for entry in entries if "loss" in entry]


DEMO = "training.py --config=demo --dataset_path=data/texts --schedule=constant --report_interval=1"
STEPS_AFTER_RESUME = 8


@pytest.fixture(scope="module")
def run(home):
    """Trains runs/demo in the user's folder with the demo's recipe, stops it by SIGUSR1, resumes it, and returns its
    path.

    The first start has more steps than it can take before it is stopped.
    """
    command = f"{DEMO} --save_ckpt_path=runs/demo {MANY_STEPS} --eval_interval=0"
    process = forked.start(command, home)
    metrics = home / "runs/demo/metrics.jsonl"
    wait_until(lambda: metrics.exists() and '"step": 3' in metrics.read_text(), "step 3")
    process.send_signal(signal.SIGUSR1)
    forked.finish(process, command, code=128 + signal.SIGUSR1)
    stopped = records.read_status(home / "runs/demo")
    assert stopped["status"] == "stopped"
    steps = stopped["step"] + STEPS_AFTER_RESUME
    output = forked.run(f"{DEMO} --save_ckpt_path=runs/demo --num_steps={steps}", home)
    assert f"step {stopped['step']}" in output
    return home / "runs/demo"


def test_the_demo_is_stopped_and_resumed_without_a_lost_or_repeated_step(run):
    steps = [step for step, _ in losses(run)]
    assert steps == list(range(1, steps[-1] + 1))
    assert records.read_status(run)["status"] == "finished"
    assert losses(run)[-1][1] < losses(run)[0][1]


# {command: a part of its output}
VERBS = {
    "mamba-fsdp inspect runs/demo": "status         finished",
    "mamba-fsdp inspect data/texts --verify": "all sizes and checksums are correct",
    "mamba-fsdp checkpoints runs/demo --verify": "whole",
    "mamba-fsdp report runs/demo": "report.html",
    "mamba-fsdp generate runs/demo --prompt='def ' --length=5": "def ",
    "mamba-fsdp evaluate runs/demo data/texts/validation --seq_length=64 --limit=4": "perplexity",
    "mamba-fsdp plan mamba-130m --memory=24 --peak=165 --bandwidth=1008": "tokens/s",
    "mamba-fsdp plan --config=demo --dataset_path=data/texts": "memory",
    "mamba-fsdp doctor": "ok   operators",
}


@pytest.mark.parametrize("command", VERBS)
def test_a_verb_can_use_the_run(enter, run, command):
    assert VERBS[command] in enter(command)


TRANSFORMERS = """
import sys
from transformers import AutoModelForCausalLM, AutoTokenizer

words = AutoTokenizer.from_pretrained(sys.argv[1])
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
tokens = model.generate(**words("def f_1_2(x", return_tensors="pt"), max_new_tokens=5, do_sample=False)
open("theirs.txt", "w").write(words.decode(tokens[0]))
"""


def test_an_export_generates_the_same_text_in_transformers(enter, run, home):
    """The exported model generates the same text in the stack's version of transformers, in a separate process.

    The prompt has more than two tokens, because after a shorter one transformers 4.57 generates other tokens with its
    cache than without it (docs/evaluating.md).
    """
    enter("mamba-fsdp export runs/demo exported/demo")
    (home / "theirs.py").write_text(TRANSFORMERS)
    enter(f"{home}/theirs.py exported/demo")
    theirs = (home / "theirs.txt").read_text()
    ours = enter("mamba-fsdp generate runs/demo --prompt='def f_1_2(x' --length=5 --temperature=0")
    assert theirs.startswith("def f_1_2(x") and theirs in ours
