"""Tests `evaluate --tasks`, which runs tasks of lm-eval: the results equal those of lm-eval's hf model on an export."""

import importlib.metadata
import json
import random
import re
import sys
from functools import partial
from pathlib import Path

import lm_eval
import numpy as np
import pytest
from lm_eval.api.registry import model_registry
from lm_eval.tasks import TaskManager

from mamba_fsdp.data import tokenizer
from mamba_fsdp.errors import UserError
from mamba_fsdp.inference import harness
from mamba_fsdp.inference.harness import MambaFSDP
from mamba_fsdp.run.records import read_entries
from mamba_fsdp.verbs import evaluate

pytestmark = pytest.mark.torch22
WORDS = "def return the line_2 naïve x y \n class of numbers".split(" ")
TASKS = {
    "ours_choice": {
        "output_type": "multiple_choice",
        "num_fewshot": 1,
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{answer}}",
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    },
    "ours_until": {
        "output_type": "generate_until",
        # The prompt is never empty, because lm-eval's hf model does not support this.
        "doc_to_text": "def return {{text}}",
        "doc_to_target": "{{choices[0]}}",
        "generation_kwargs": {"until": ["\n", "line_1"], "max_gen_toks": 20},
        "metric_list": [{"metric": "exact_match"}],
    },
    "ours_rolling": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{text}}",
        "metric_list": [{"metric": "bits_per_byte"}, {"metric": "word_perplexity"}],
    },
}
WINDOW = 64


def text_of(draw, words):
    return " ".join(draw.choices(WORDS, k=words))


@pytest.fixture(scope="session")
def task_files(tmp_path_factory):
    """Returns a folder with the definitions of TASKS and of two tasks that can't be run. Some questions are empty, and
    some are longer than a window."""
    folder = tmp_path_factory.mktemp("tasks")
    draw = random.Random(0)
    lines = []
    for words in [0, 1, 3, 8, 20, 40, 90]:
        choices = [" x", " y", " " + text_of(draw, 3), " " + text_of(draw, 9)]
        document = {"text": text_of(draw, words), "choices": choices, "answer": draw.randrange(4)}
        lines.append(json.dumps(document))
    draw.shuffle(lines)
    (folder / "questions.json").write_text("\n".join(lines))
    data = {"data_files": {"test": str(folder / "questions.json")}, "cache_dir": str(folder)}
    beams = {"num_beams": 4, **TASKS["ours_until"]["generation_kwargs"]}
    others = {
        "ours_beams": {**TASKS["ours_until"], "generation_kwargs": beams},
        "ours_wrong": {**TASKS["ours_until"], "doc_to_text": "{{nothing.here}}"},
    }
    for name, task in (TASKS | others).items():
        common = {"task": name, "dataset_path": "json", "dataset_kwargs": data}
        splits = {"test_split": "test", "fewshot_split": "test"}
        described = {"doc_to_text": "{{text}}", **common, **splits, **task}
        (folder / f"{name}.yaml").write_text(json.dumps(described))  # JSON is valid YAML
    return folder


@pytest.fixture
def run(in_user_folder, answer, task_files, monkeypatch):
    """Returns a function run(*arguments), which runs `evaluate` and returns (exit code, stdout, stderr).

    lm-eval does not load its own tasks, because this takes seconds.
    """
    monkeypatch.setattr(harness, "TaskManager", partial(TaskManager, include_defaults=False))
    return partial(answer, evaluate)


def answers(model, task_files, **options):
    """Runs TASKS on a model. Returns {(task, index of the question): list of the model's responses}."""
    manager = TaskManager(include_path=str(task_files), include_defaults=False)
    options |= {"tasks": list(TASKS), "task_manager": manager, "bootstrap_iters": 0}
    found = lm_eval.simple_evaluate(model, **options)
    return {
        (task, sample["doc_id"]): np.array(sample["resps"]).ravel().tolist()
        for task, samples in found["samples"].items()
        for sample in samples
    }


def assert_same(ours, theirs):
    assert ours.keys() == theirs.keys() and len(ours) == 21
    for question, answer in ours.items():
        expected = theirs[question]
        if question[0] != "ours_until":
            expected = pytest.approx(expected, abs=1e-4, rel=1e-6)
        assert answer == expected, question


@pytest.mark.slow
def test_answers_equal_the_hf_model_on_the_export(in_user_folder, task_files, project):
    """Responses and log-likelihoods equal those of lm-eval's hf model on the export, with another batch size.

    lm-eval finds our class by the name of its entry point. The test registers the entry point in the same way as a
    release of lm-eval that supports plugins.
    """
    tomllib = pytest.importorskip("tomllib")  # Python 3.10 does not have it
    groups = tomllib.loads((project / "pyproject.toml").read_text())["project"]["entry-points"]
    ((name, value),) = groups["lm_eval.models"].items()
    point = importlib.metadata.EntryPoint(name, value, "lm_eval.models")
    model_registry.register(name, target=point)
    how = {"device": "cpu", "task_files": task_files}
    ours = answers(
        name, batch_size=5, model_args=f"pretrained=runs/demo,max_length={WINDOW}", **how
    )
    model_args = f"pretrained=exported/demo,max_length={WINDOW}"
    assert_same(ours, answers("hf", batch_size=3, model_args=model_args, **how))


def test_the_arguments_are_named_like_hf(in_user_folder):
    usual = MambaFSDP("runs/demo")
    assert (usual.max_length, usual.batch_size) == (2048, 8)
    usual.tokenizer.bos_token = "x"
    assert usual.prefix_token_id == usual.tokenizer.encode("x")[0] != usual.eot_token_id
    for wrong in ({"device": "cuda:0"}, {"batch_size": "auto"}, {"dtype": "float32"}):
        with pytest.raises(UserError, match="takes pretrained, tokenizer"):
            MambaFSDP("runs/demo", **wrong)


MISTAKES = {
    "--tasks=ours_choise": "defines it; did you mean ours_choice?",
    "--tasks=ours_until --seq_length=20": "a task generates 20 tokens: --seq_length=20 must be larger",
    "--tasks=ours_wrong": "--tasks: lm-eval stopped with UndefinedError",
    "--tasks=5 --include_path=number": "lm-eval stopped with TypeError: ",
    "--tasks=ours_beams": "a task sets num_beams",
    "--tasks=ours_until --include_path=gone": "--include_path=gone: there is no such",
    "--tasks=ours_choice --seq_length=4": "tokens, but a window only 4",
    "--tasks=ours_until --tokenizer=of_400": "more than the model",
}


@pytest.mark.parametrize("arguments", MISTAKES)
def test_mistakes_are_errors_of_one_line(run, task_files, arguments):
    tokenizer.train(map(str, range(3000)), 400).save(Path("of_400"))
    Path("number").mkdir(exist_ok=True)
    Path("number", "a.yaml").write_text("task: 5")
    Path("number", "b.yaml").write_text("task: name")
    given = arguments.split()
    if "--include_path" not in arguments:
        given.append(f"--include_path={task_files}")
    code, _, err = run("runs/demo", *given)
    assert code == 2 and MISTAKES[arguments] in err.splitlines()[-1]


def test_results_are_printed_and_written(run, task_files):
    arguments = [
        f"--tasks={','.join(TASKS)}",
        f"--include_path={task_files}",
        f"--seq_length={WINDOW}",
    ]
    code, out, err = run("runs/demo", *arguments, "--limit=3", "--num_fewshot=2")
    assert code == 0
    for text in ("runs/demo/checkpoints/step_00000004", "|ours_choice ", "|exact_match", "±"):
        assert text in out
    (kept,) = Path("runs/demo").glob("lm_eval_*.json")
    found = json.loads(kept.read_text())
    assert found["n-samples"]["ours_until"]["effective"] == 3
    assert found["n-shot"]["ours_choice"] == 2
    assert str(kept) in err
    code, out, _ = run("exported/demo", *arguments, "--json")
    found = json.loads(out)
    assert code == 0 and set(found["results"]) == set(TASKS)
    assert (
        found["n-samples"]["ours_until"]["effective"] == 7 and found["n-shot"]["ours_choice"] == 1
    )
    assert not list(Path("exported/demo").glob("lm_eval_*"))
    code, out, _ = run("runs/demo", *arguments, "--limit=3", "--num_fewshot=2", "--follow")
    *_, line = read_entries(Path("runs/demo/evaluations") / f"{','.join(TASKS)}.jsonl")
    assert code == 0 and line["step"] == 4 and "\ncomplete   runs/demo is finished" in out


def test_without_lm_eval_the_error_explains_how_to_install_it(run, monkeypatch, project):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    code, _, err = run("runs/demo", "--tasks=hellaswag")
    assert code == 2 and len(err.splitlines()) == 1
    assert re.search("/bin/python -m pip install -r .*requirements/lm-eval.txt", err)
