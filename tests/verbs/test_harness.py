"""lm-evaluation-harness on a model of ours gives what its own `hf` model gives on the export."""

import json
import os
import subprocess
import sys

import pytest

from mamba_fsdp import command_line
from mamba_fsdp.verbs import evaluate

lm_eval = pytest.importorskip("lm_eval")
pytestmark = pytest.mark.slow  # the harness takes seconds to import
TASKS = {
    "choose": {
        "output_type": "multiple_choice",
        "doc_to_text": "def {{name}}(x): ",
        "doc_to_target": 1,
        "doc_to_choice": ["return", "naïve x", "{{name}}"],
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    },
    "read": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{text}}",
        "metric_list": [{"metric": "word_perplexity"}, {"metric": "bits_per_byte"}],
    },
    "write": {
        "output_type": "generate_until",
        "doc_to_text": "def {{name}}",
        "doc_to_target": "(x): return",
        "generation_kwargs": {"until": ["\n", "#"], "max_gen_toks": 12},
        "metric_list": [{"metric": "exact_match"}],
    },
}


@pytest.fixture
def tasks(tmp_path):
    """A folder of tasks of all three kinds over one file."""
    rows = [
        {"name": f"line_{n}", "text": f"def line_{n}(x): return {n} # naïve\n" * (1 + n % 4)}
        for n in range(9)
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, task in TASKS.items():
        told = {
            "task": name,
            "dataset_path": "json",
            "test_split": "test",
            "metadata": {"version": 1},
            "dataset_kwargs": {"data_files": {"test": str(tmp_path / "rows.jsonl")}},
            **task,
        }
        (tmp_path / f"{name}.yaml").write_text(json.dumps(told))  # JSON is YAML
    return tmp_path


def test_our_model_and_its_export_get_the_same_scores(there, tasks, capsys):
    from lm_eval.models.huggingface import HFLM

    with pytest.raises(SystemExit) as exit:
        command_line.run(
            evaluate.main,
            lambda: "",
            [
                "runs/demo",
                f"--tasks={','.join(TASKS)}",
                f"--include_path={tasks}",
                "--seq_length=32",
                "--batch_size=4",
                "--json",
            ],
        )
    told = capsys.readouterr()
    assert exit.value.code == 0, told.err
    ours = json.loads(told.out)["tasks"]["model"]
    theirs = HFLM(
        pretrained="exported/demo", dtype="float32", max_length=32, batch_size=1, device="cpu"
    )
    expected = lm_eval.simple_evaluate(
        theirs,
        tasks=list(TASKS),
        log_samples=True,
        task_manager=lm_eval.tasks.TaskManager(include_path=str(tasks)),
    )
    for task, numbers in expected["results"].items():
        for name, value in numbers.items():
            if isinstance(value, float):
                assert ours[task][name.removesuffix(",none")] == pytest.approx(value, rel=1e-4), (
                    task,
                    name,
                )
    assert ours["read"]["bits_per_byte"] > 0


def test_scores_and_texts_of_each_request_are_those_of_the_export(there):
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    from mamba_fsdp.parallel.world import World
    from mamba_fsdp.verbs import harness, loading

    ours = harness.OurModel(loading.load("runs/demo"), World.alone(), 32, 3)
    theirs = HFLM(
        pretrained="exported/demo", dtype="float32", max_length=32, batch_size=1, device="cpu"
    )

    def requests(kind, arguments):
        return [Instance(kind, {}, given, 0) for given in arguments]

    pairs = requests(
        "loglikelihood",
        [("def line", "_1(x)"), ("", "naïve"), ("x " * 60, "return 3"), ("def ", " x")],
    )
    for one, other in zip(ours.loglikelihood(pairs), theirs.loglikelihood(pairs)):
        assert one[0] == pytest.approx(other[0], abs=1e-3) and one[1] == other[1]
    texts = requests("loglikelihood_rolling", [("def line_1(x): return 1 * x\n" * 9,), ("x",)])
    assert ours.loglikelihood_rolling(texts) == pytest.approx(
        theirs.loglikelihood_rolling(texts), abs=1e-2
    )
    wanted = {"until": ["\n", "x)"], "max_gen_toks": 12}
    prompts = requests(
        "generate_until",
        [
            ("def line", wanted),
            ("x", wanted),
            ("def line_3(x): return", wanted),
            ("def", {**wanted, "max_gen_toks": 5}),
        ],
    )
    assert ours.generate_until(prompts) == theirs.generate_until(prompts)


@pytest.mark.parametrize(
    "name, said",
    [("chose", "there is no such task; did you mean choose"), ("elsewhere", "no network")],
)
def test_tasks_that_there_are_not_are_a_line(there, tasks, name, said, capsys, monkeypatch):
    from lm_eval.tasks import TaskManager

    from mamba_fsdp.verbs import harness

    # Those of the harness itself are thousands of files.
    monkeypatch.setattr(
        harness, "TaskManager", lambda **how: TaskManager(**{**how, "include_defaults": False})
    )
    monkeypatch.setattr(harness, "OFFLINE", "HF_HUB_OFFLINE is set")
    told = json.loads((tasks / "choose.yaml").read_text())
    (tasks / "elsewhere.yaml").write_text(
        json.dumps(
            {**told, "task": "elsewhere", "dataset_path": "nobody/nothing", "dataset_kwargs": {}}
        )
    )
    with pytest.raises(SystemExit) as exit:
        command_line.run(
            evaluate.main, lambda: "", ["runs/demo", f"--include_path={tasks}", f"--tasks={name}"]
        )
    told = capsys.readouterr()
    errors = [line for line in told.err.splitlines() if line.startswith("error: ")]
    assert (
        exit.value.code == 2
        and len(errors) == 1
        and said in errors[0]
        and "Traceback" not in told.err
    )


def test_without_the_harness_it_says_how_to_install_it(there, project):
    code = (
        "import sys; sys.modules['lm_eval'] = None; from mamba_fsdp import command_line\n"
        "from mamba_fsdp.verbs import evaluate\n"
        "command_line.run(evaluate.main, str, ['runs/demo', '--tasks=choose'])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=there,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(project)},
    )
    assert done.returncode == 2 and done.stderr.startswith(
        "error: --tasks needs lm-evaluation-harness"
    )
    assert "pip install lm_eval" in done.stderr and len(done.stderr.splitlines()) == 1
