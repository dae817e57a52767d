"""tests/run.sh: the kernels' tests run in a call of their own, beside Triton, with the words that belong to them. And
what .ci/run has running beside it."""

import os
import shutil
from pathlib import Path

import pytest

from tests.support.processes import run_program, wait_until, write_program

PYTHON = """#!/usr/bin/env bash
if [ "$2" = benchmarks.kernels.install ]; then echo /triton; exit ${NO_TRITON:-0}; fi
if [ "$2" = compileall ]; then exit; fi
shift 9 # -m pytest -n 4 --dist loadfile --no-loadscope-reorder --durations=25 --durations-min=1
echo "${TRITON_INTERPRET:-0} ${PYTHONPATH:-} |" "$@"
if [ -n "${TRITON_INTERPRET:-}" ]; then exit ${SECOND:-0}; fi
exit ${FIRST:-0}
"""


@pytest.fixture
def run(project, tmp_path, monkeypatch):
    """run(words, SECOND="1") gives exit status and pytest's calls, as [(beside Triton, words)]."""
    (tmp_path / "tests").mkdir()
    shutil.copy(project / "tests/run.sh", tmp_path / "tests")
    scripts = {
        "0.create_env.sh": "#!/bin/sh\n",
        ".venv/bin/python": PYTHON,
        ".venv-torch2.2/bin/python": PYTHON,
    }
    for name, script in scripts.items():
        write_program(tmp_path / name, script)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)

    def run(words="", **environment):
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        done = run_program(tmp_path / "tests/run.sh", *words.split())
        calls = [line.split(" |") for line in done.stdout.splitlines()]
        return done.returncode, [(before == "1 /triton", words.strip()) for before, words in calls]

    return run


@pytest.mark.parametrize(
    "words, calls",
    [
        ("", [(False, ""), (True, "tests/kernels")]),
        ("-k tied", [(False, "-k tied"), (True, "tests/kernels -k tied")]),
        ("tests/model -x", [(False, "tests/model -x")]),
        ("tests/kernels/test_scan.py -x", [(True, "tests/kernels/test_scan.py -x")]),
        ("tests/model tests/kernels", [(False, "tests/model"), (True, "tests/kernels")]),
        ("--stack torch2.2 -x", [(False, "-m torch22 -x")]),
        ("--slow", [(False, "-m slow"), (True, "-m slow tests/kernels")]),
    ],
)
def test_words_go_where_they_belong(run, words, calls):
    assert run(words) == (0, calls)


@pytest.mark.parametrize(
    "first, second, status",
    [(0, 0, 0), (1, 0, 1), (0, 1, 1), (5, 0, 0), (0, 5, 0), (5, 5, 5), (5, 1, 1)],
)
def test_either_call_can_fail(run, first, second, status):
    assert run("-k tied", FIRST=str(first), SECOND=str(second))[0] == status


def test_an_interrupt_ends_it(run):
    assert run(FIRST="2") == (2, [(False, "")])


def test_without_triton_the_rest_runs(run):
    assert run(NO_TRITON="1") == (0, [(False, "")])


@pytest.fixture
def ci(project, tmp_path):
    """ci(pinned, rest) runs .ci/run, where the tests of the pinned stack and the others are these scripts."""

    def run(pinned, rest):
        for name, script in (
            ("0.create_env.sh", ""),
            ("tests/run.sh", f'case "$*" in *torch2.2*) {pinned} ;; *) {rest} ;; esac'),
            ("bin/dpkg-query", ""),
            (".ci/run", (project / ".ci/run").read_text()),
        ):
            text = script if script.startswith("#!") else f"#!/bin/sh\n{script}\n"
            write_program(tmp_path / name, text)
        return run_program(tmp_path / ".ci/run", PATH=f"{tmp_path}/bin:{os.environ['PATH']}")

    return run


def test_what_ci_runs_beside_the_tests_ends_with_them(ci, tmp_path):
    """Else the next run, of which it knows nothing, would make the same environment at the same time."""
    endless = "sleep 600 & echo $! >begun; mv begun running; wait"
    assert ci(endless, "until [ -e running ]; do sleep 0.1; done; exit 3").returncode == 3
    process = Path("/proc", (tmp_path / "running").read_text().strip(), "cmdline")
    # Nothing is left of a zombie's.
    wait_until(lambda: not (process.exists() and process.read_bytes()))


def test_ci_fails_with_the_pinned_stack_and_says_why(ci):
    done = ci("echo pinned; exit 4", "echo rest")
    assert done.returncode == 4 and "rest\n" in done.stdout and "pinned\n" in done.stdout
    assert ci("exit 0", "exit 0").returncode == 0
