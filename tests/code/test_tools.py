"""Tests that the linters find no problems, and that the summary of the tests is correct.

ruff checks all Python files, their format, and that each has a docstring (D100, D104). mypy checks the library and the
benchmarks. ruff and mypy assume the Python 3.10 of the image, with which no tests run. shellcheck and hadolint check
the other files.
"""

import os
import sys
from pathlib import Path

import pytest

from tests.support.processes import run_program
from tests.support.summary import read_part, summarize


@pytest.mark.parametrize(
    "command",
    [
        "mypy --no-error-summary",
        "ruff check --no-cache --extend-select=D100,D104 .",
        "ruff format --check --no-cache .",
        "git ls-files '*.sh' '*.sbatch' '*.bash' | xargs shellcheck --external-sources",
        "hadolint Dockerfile",
    ],
)
def test_linters_find_no_problems(project, command):
    tools = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = run_program("bash", "-c", command, cwd=project, PATH=tools)
    assert done.returncode == 0, done.stdout + done.stderr


CASES = "<suite><testcase file='a' name='quick' time='1'/><testcase file='a' name='slow' time='9'/></suite>"


def test_the_summary_ends_with_the_totals(tmp_path, capsys):
    """The summary ends with the slowest tests, the parts that exceeded their time limit, and the totals. A part that
    exceeds its limit is not a failure."""
    for name, seconds in (("tests", 30), ("kernels", 3)):
        (tmp_path / f"cpu-{name}.end").write_text(f"0 {seconds} 10\n")
        (tmp_path / f"cpu-{name}.xml").write_text(CASES)
    parts = [read_part(tmp_path, place, False) for place in ("cpu/tests", "cpu/kernels")]
    assert summarize(parts) == 0
    output = capsys.readouterr().out
    assert output.endswith("\n4 passed, 0 failed, 0 skipped in 33 s\n")
    assert "       9 s  cpu: a::slow\nover its budget  cpu: tests: 30 s of 10\n\n4" in output
