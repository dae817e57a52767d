"""tests/run.sh and .ci/run: which tests each of their parts runs, and the one line over all of them at the end."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import summary
from tests.support.processes import finish, run_program, wait_until, write_program

# A Python whose pytest says how it was called, and does what $do_tests, $do_kernels or $do_pinned says.
PYTHON = f"""#!/usr/bin/env bash
case $2 in
benchmarks.kernels.install) echo /triton; exit ${{NO_TRITON:-0}} ;;
compileall | pip) exit ;;
pytest) ;;
*) exec {sys.executable} "$@" ;;
esac
part=tests
if [ "${{TRITON_INTERPRET:-0}} ${{PYTHONPATH:-}}" = "1 /triton" ]; then part=kernels; fi
if [ "$MAMBA_FSDP_TEST_STACK" = torch2.2 ]; then part=pinned; fi
for word; do case $word in --junitxml=*) xml=${{word#*=}} ;; esac; done
echo "called: $part: ${{*:16}}"
status=0 cases='<testcase name="one"/><testcase name="two"/>'
name=do_$part
eval "${{!name:-}}"
echo "<testsuites>$cases</testsuites>" >"$xml"
exit $status
"""
EMPTY = "status=5 cases="
FAILS = "status=1 cases='<testcase name=\"bad\"><failure/></testcase>'"
KILLED = "kill -KILL $$"


@pytest.fixture
def checkout(project, tmp_path, monkeypatch):
    """A folder with both scripts, and stand-ins for all that takes long."""
    for name in ("tests/run.sh", ".ci/run", "tests/support/summary.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(project / name, tmp_path / name)
    write_program(tmp_path / "0.create_env.sh", "#!/bin/sh\nexit ${NO_ENVIRONMENT:-0}\n")
    write_program(tmp_path / "bin/dpkg-query", "#!/bin/sh\n")
    for venv in (".venv", ".venv-torch2.2"):
        write_program(tmp_path / venv / "bin/python", PYTHON)
    for name in ("CI", "PYTHONPATH", "TRITON_INTERPRET"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    return tmp_path


def calls_of(done):
    start = "called: "
    lines = done.stdout.splitlines()
    return [line.removeprefix(start).strip() for line in lines if line.startswith(start)]


@pytest.mark.parametrize(
    "words, calls",
    [
        ([], ["tests: not pinned", "kernels: not pinned tests/kernels"]),
        (
            ["-k", "tied"],
            ["tests: not pinned -k tied", "kernels: not pinned tests/kernels -k tied"],
        ),
        (["./tests/model", "-x"], ["tests: not pinned ./tests/model -x"]),
        (["tests/kernels/test_scan.py"], ["kernels: not pinned tests/kernels/test_scan.py"]),
        (
            ["tests/model", "tests/kernels"],
            ["tests: not pinned tests/model", "kernels: not pinned tests/kernels"],
        ),
        (["--stack", "torch2.2", "-x"], ["pinned: (torch22 or pinned) -x"]),
        (["--slow", "--stack=torch2.2"], ["pinned: (torch22 or pinned) and slow"]),
        (
            ["--quick"],
            ["tests: not pinned and not slow --loadscope-reorder --durations=10 --durations-min=3"],
        ),
    ],
)
def test_words_go_where_they_belong(checkout, words, calls):
    done = run_program(checkout / "tests/run.sh", *words)
    assert calls_of(done) == calls and done.returncode == 0
    assert done.stdout.endswith(f"\n\n{2 * len(calls)} passed, 0 failed, 0 skipped\n")


@pytest.mark.parametrize(
    "words, outcomes, status, said",
    [
        ("", {"do_kernels": FAILS}, 1, "failed  cpu: ::bad\n\n2 passed, 1 failed, 0 skipped"),
        ("", {"do_tests": FAILS, "do_kernels": FAILS}, 1, "0 passed, 2 failed, 0 skipped"),
        ("", {"do_kernels": EMPTY}, 1, "cpu: kernels: it ran no test\n\n2 passed, 1 failed"),
        ("-k tied", {"do_kernels": EMPTY}, 0, "\n\n2 passed, 0 failed, 0 skipped"),
        ("-k tied", {"do_tests": EMPTY, "do_kernels": EMPTY}, 5, "no test fits these words\n\n0 p"),
        ("--stack torch2.2 tests/kernels", {}, 5, "no test fits these words\n\n0 passed, 0 failed"),
        (
            "",
            {"do_tests": KILLED},
            1,
            "tests: it did not run to its end\n\n2 passed, 1 failed",
        ),
        (
            "",
            {"do_tests": "status=2"},
            1,
            "it was interrupted\n\n2 passed, 1 failed, 0 skipped",
        ),
        ("", {"NO_TRITON": "1"}, 0, "see the error above\n\n2 passed, 0 failed, 1 skipped"),
        ("", {"NO_TRITON": "1", "CI": "true"}, 1, "2 passed, 1 failed, 0 skipped"),
    ],
)
def test_every_part_counts(checkout, words, outcomes, status, said):
    done = run_program(checkout / "tests/run.sh", *words.split(), **outcomes)
    assert said in done.stdout and done.returncode == status, done.stdout
    assert len(calls_of(done)) < 2 or outcomes.get("do_tests") != "status=2"  # an interrupt


TESTS = """
import os, pytest
@pytest.fixture
def broken():
    yield
    raise ValueError
def test_passes(): pass
def test_is_skipped(): pytest.skip("no <tool> & no\\nother")
def test_fails(): assert 0
def test_is_not_tidy(broken): pass
def test_ends_its_process(): os._exit(3)
"""


def test_pytests_own_counts_are_read(tmp_path):
    """Those of processes that run tests at the same time, one of which dies."""
    (tmp_path / "test_tests.py").write_text(TESTS)
    (tmp_path / "test_module.py").write_text("import no_such_module\n")
    options = ["-p", "xdist", "-n1", "-c", "/dev/null", "--rootdir=.", "-o", "junit_family=xunit1"]
    options.append("--junitxml=cpu-tests.xml")
    pytest_words = ["-m", "pytest", *options]
    only = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # the other plugins take a second to import
    done = run_program(sys.executable, *pytest_words, cwd=tmp_path, **only)
    (tmp_path / "cpu-tests.end").write_text(f"{done.returncode} 7\n")
    part = summary.read_part(tmp_path, "cpu/tests", False)
    assert part.passed == 1 and part.seconds == "7"
    assert part.skipped == ["cpu: test_tests.py: no <tool> & no other"]
    failed = [line.rpartition("::")[2] for line in part.failed]
    expected = ["test_ends_its_process", "test_fails", "test_is_not_tidy", "test_module"]
    assert sorted(failed) == expected


@pytest.mark.parametrize(
    "ci, stack, test, reason, may_be",
    [
        ("true", "torch2.2", "tests/slurm/test_a.py::test", "no sbatch", False),
        ("true", "cpu", "tests/container/test_image.py::test", "no buildah", False),
        ("true", "cpu", summary.MAY_BE_SKIPPED_ON_CI[0], "no index", True),
        ("true", "torch2.2", "tests/ops/test_a.py::test", "this PyTorch has no varlen_attn", True),
        ("true", "torch2.2", "tests/ops/test_a.py::test", "no C compiler", False),
        ("true", "cpu", "tests/gpu/test_a.py::test", "no GPU", True),
        ("", "torch2.2", "tests/slurm/test_a.py::test", "no sbatch", True),
    ],
)
def test_what_cis_machine_can_run_is_not_skipped_there(
    monkeypatch, ci, stack, test, reason, may_be
):
    monkeypatch.setenv("CI", ci)
    part = summary.Part(stack, "tests")
    part.skip(test, reason)
    assert (len(part.skipped), len(part.failed)) == (may_be, not may_be)


def test_ci_sums_up_both_stacks(checkout):
    done = run_program(checkout / ".ci/run", do_pinned=FAILS, do_tests="sleep 0.1")
    assert sorted(calls_of(done)) == [
        "kernels: not pinned tests/kernels",
        "pinned: (torch22 or pinned) -n 3",
        "tests: not pinned",
    ]
    end = "failed  torch2.2: ::bad\n\n4 passed, 1 failed, 0 skipped\n"
    assert done.stdout.endswith(end) and done.returncode == 1 and done.stderr == ""
    assert run_program(checkout / ".ci/run").returncode == 0
    done = run_program(checkout / ".ci/run", NO_ENVIRONMENT="1")
    assert done.stdout.endswith("\n0 passed, 3 failed, 0 skipped\n") and done.returncode == 1


def test_what_ci_began_ends_with_it(checkout):
    """Else the next run, of which it knows nothing, would make the same environment at the same time."""
    names = ("tests", "pinned")
    outcomes = {
        f"do_{name}": f"sleep 600 & echo $! >{name}.begun; mv {name}.begun {name}.running; wait"
        for name in names
    }
    ci = subprocess.Popen(
        [checkout / ".ci/run"], env={**os.environ, **outcomes}, stdout=subprocess.DEVNULL
    )
    files = [checkout / f"{name}.running" for name in names]
    wait_until(lambda: all(file.exists() for file in files), "both parts run")
    processes = [Path("/proc", file.read_text().strip(), "cmdline") for file in files]
    ci.send_signal(signal.SIGINT)
    assert finish(ci)[0] == 130
    for process in processes:
        # Nothing is left of a zombie's.
        wait_until(lambda process=process: not (process.exists() and process.read_bytes()))
