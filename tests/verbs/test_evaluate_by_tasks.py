"""evaluate --tasks: what is told of lm-eval's results, and where they are kept."""

import json
from pathlib import Path

import pytest

from mamba_fsdp.run.records import read
from tests.inference.test_tasks import TASKS, WINDOW, run, task_files  # noqa: F401 - fixtures

pytestmark = pytest.mark.torch22


def test_what_is_told_and_kept(run, task_files):  # noqa: F811
    words = [f"--tasks={','.join(TASKS)}", f"--include_path={task_files}", f"--seq_length={WINDOW}"]
    code, out, err = run("runs/demo", *words, "--limit=3", "--num_fewshot=2")
    assert code == 0
    for text in ("runs/demo/checkpoints/step_00000004", "|ours_choice ", "|exact_match", "±"):
        assert text in out
    (kept,) = Path("runs/demo").glob("lm_eval_*.json")
    found = json.loads(kept.read_text())
    assert found["n-samples"]["ours_until"]["effective"] == 3
    assert found["n-shot"]["ours_choice"] == 2
    assert str(kept) in err
    code, out, _ = run("exported/demo", *words[:2], "--seq_length=40", "--limit=2", "--json")
    assert code == 0 and set(json.loads(out)["results"]) == set(TASKS)
    assert not list(Path("exported/demo").glob("lm_eval_*"))
    code, out, _ = run("runs/demo", *words, "--limit=3", "--num_fewshot=2", "--follow")
    *_, line = read(Path("runs/demo/evaluations") / f"{','.join(TASKS)}.jsonl")
    assert code == 0 and line["step"] == 4 and "\nover       runs/demo is finished" in out
    accuracy = found["results"]["ours_choice"]["acc,none"]
    assert line["evaluated"]["ours_choice/acc"] == accuracy
