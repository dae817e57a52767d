"""Tests that a mistake causes one line with a remedy, which is printed before libraries are imported that take seconds
to load."""

import json
import os
import subprocess
import sys

import pytest

from mamba_fsdp.checkpoint.contents import DTYPES
from mamba_fsdp.conventions import SAFETENSORS_DTYPES
from mamba_fsdp.errors import UserError
from mamba_fsdp.launch.plan import check_folder
from mamba_fsdp.run import lease
from tests.support.tiny import resolved

P4D = "--instance=p4d.24xlarge"
NO_SUCH_PLACE = ": there is no such file or folder"
NEITHER_WAY = "give either DATA or --tasks"
NAME_DATA = "--hours: give the data, as in plan data/mine --hours=8"
REFUSED = {
    "": {
        "genrate": "there is no verb 'genrate'",
    },
    "train": {
        "stray": "stray: settings are written --name=value",
        "--max_sequence_length=1": "max_sequence_length: there is no such setting (on the command line); did you mean "
        "seq_length?",
        "--dataset_path=nothing": "make a token store there: ",
        "--use_dummy_dataset --init_from=empty": "empty: an empty folder, not a model",
        "--use_dummy_dataset --save_ckpt_path=taken": "taken is in use by process",
        "--dataset_path=nothing --save_ckpt_path=taken": f"nothing{NO_SUCH_PLACE}",
        "--use_dummy_dataset --d_model=10M": "GB free",
    },
    "plan": {
        f"mamba-130m {P4D} --memory=4GB": "--memory=4GB: expected a number",
        "data/builtin --hours=8 --tokens=2e9": NAME_DATA,
        "--hours=8": NAME_DATA,
        "data/builtin --hours=8 --d_model=64": "d_model: plan chooses it with --hours",
        "--hours=8 --tokens=2e9 --model_name=olmo-hybrid-7b": "olmo-hybrid-7b has other fixed widths",
        f"demo {P4D} --hours_between_failures=0": "--hours_between_failures=0: must be above 0",
        f"demo {P4D} --hours_between_failures=9 --measured=empty": "empty: the run's events.jsonl records no save",
        "demo --hours_between_failures=9 --memory=24": "the time of a step is unknown",
    },
    "evaluate": {
        "nothing data": f"nothing{NO_SUCH_PLACE}",
        "run data": "run: a run without a checkpoint, not a model",
        "runs/demo a.txt": "get_dataset.py a.txt OUT --tokenizer=runs/demo/tokenizer ",
        "runs/demo data/builtin --num_fewshot=2": "--num_fewshot=2 has no effect without --tasks",
        "runs/demo --tasks=a --stride=8": "--stride=8 has no effect without DATA (instead of --tasks)",
        "runs/demo data/builtin --tasks=a": NEITHER_WAY,
        "runs/demo": NEITHER_WAY,
    },
    "generate": {
        "": "missing a required argument: 'model'",
        "empty": "empty: an empty folder, not a model",
        "runs/demo --prompt=na\udcefve": "--prompt: invalid UTF-8 after 'na'; convert it, ",
    },
    "export": {
        "nothing out": f"nothing{NO_SUCH_PLACE}",
    },
    "checkpoints": {
        "nowhere": f"nowhere{NO_SUCH_PLACE}",
        "empty": "empty: an empty folder, not a run with a checkpoint",
    },
    "inspect": {
        "/nowhere --verify=on": f"/nowhere{NO_SUCH_PLACE}",
        "n" * 300: "n" * 300,
    },
    "report": {
        "": "no run folder was given; give at least one",
        "nowhere": f"nowhere{NO_SUCH_PLACE}",
        "empty": "empty: an empty folder, not a run",
        "run": "metrics.jsonl has no entries yet",
        "runs/demo --out=a.txt/report.html": "a.txt: can't be written",
    },
    "preflight": {
        "report folder": "write `report FOLDER SETTINGS`, `judge FOLDER NODE ...` or `kernels RUN SETTINGS`",
    },
    "tokenize": {
        "* ": "give OUT too",
    },
}
LINES = [f"{verb} {words}".strip() for verb, table in REFUSED.items() for words in table]
FAST = {"checkpoints runs/demo": 3, "inspect runs/demo": 5, "train --version": 1, "": 15}

# This program reads a JSON list of command lines from stdin. It runs each of them as arguments of mamba-fsdp, and
# prints a line with [exit code, output] for each.
ANSWERS = """
import contextlib, io, json, shlex, sys
from mamba_fsdp.__main__ import main
for line in json.load(sys.stdin):
    sys.argv = ["mamba-fsdp", *shlex.split(line)]
    output = io.StringIO()
    try:
        with contextlib.redirect_stderr(output), contextlib.redirect_stdout(output):
            main()
    except SystemExit as end:
        print(json.dumps([end.code, output.getvalue()]))
"""


@pytest.fixture(scope="module")
def answers(user_folder, project, tmp_path_factory):
    """Returns {command line: (exit code, output)}. The Python that runs the command lines can't import slow
    libraries."""
    libraries = tmp_path_factory.mktemp("libraries")
    for name in ("torch", "datasets", "transformers"):
        (libraries / f"{name}.py").write_text(f"raise SystemExit('imported {name}')\n")
    (user_folder / "run/checkpoints").mkdir(parents=True)
    (user_folder / "empty").mkdir()
    (user_folder / "taken").mkdir()
    monkeypatch = pytest.MonkeyPatch()
    monkeypatch.setattr(lease, "RENEWAL_SECONDS", 0.1)
    holder = lease.Lease(user_folder / "taken/lease.json")
    holder.acquire(print, "")
    lines = [*LINES, *FAST]
    done = subprocess.run(
        [sys.executable, "-c", ANSWERS],
        cwd=user_folder,
        env={"PYTHONPATH": f"{libraries}:{project}", "PATH": "/usr/bin:/bin", "COLUMNS": "80"},
        input=json.dumps(lines),
        capture_output=True,
        text=True,
    )
    holder.close()
    monkeypatch.undo()
    assert done.returncode == 0, done.stderr
    return dict(zip(lines, map(json.loads, done.stdout.splitlines()), strict=True))


@pytest.mark.parametrize("verb", REFUSED)
def test_mistakes_are_one_line_with_the_reason(answers, verb):
    for words, reason in REFUSED[verb].items():
        code, output = answers[f"{verb} {words}".strip()]
        assert code == 2, (words, output)
        assert output.startswith("error: ") and reason in output, (words, output)
        assert len(output.splitlines()) == 1, output


def test_commands_that_need_no_torch_do_not_import_it(answers):
    for line, lines in FAST.items():
        code, output = answers[line]
        assert code == 0 and len(output.splitlines()) >= lines, output


def test_dtypes_of_checkpoints_are_those_that_torch_reads():
    assert DTYPES == SAFETENSORS_DTYPES.keys()


def test_a_read_only_run_folder_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(UserError, match=f"save_ckpt_path: can't write to {tmp_path}"):
        check_folder(resolved(save_ckpt_path=tmp_path))
