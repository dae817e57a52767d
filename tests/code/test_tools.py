"""Tests that the tools find no problem: ruff in all Python files, which must also be formatted and have module
docstrings (D100, D104), the type checker in library and benchmarks, shellcheck and hadolint in the other files.

ruff and the type checker assume the image's Python 3.10, because no test runs with it.
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
def test_finds_nothing(project, command):
    tools = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = run_program("bash", "-c", command, cwd=project, PATH=tools)
    assert done.returncode == 0, done.stdout + done.stderr


CASES = "<suite><testcase file='a' name='quick' time='1'/><testcase file='a' name='slow' time='9'/></suite>"


def test_the_tests_end_with_one_line_over_all_parts(tmp_path, capsys):
    """It follows the slowest tests and the parts that exceeded their time limit. Exceeding it is not a failure."""
    for name, seconds in (("tests", 30), ("kernels", 3)):
        (tmp_path / f"cpu-{name}.end").write_text(f"0 {seconds} 10\n")
        (tmp_path / f"cpu-{name}.xml").write_text(CASES)
    parts = [read_part(tmp_path, place, False) for place in ("cpu/tests", "cpu/kernels")]
    assert summarize(parts) == 0
    said = capsys.readouterr().out
    assert said.endswith("\n4 passed, 0 failed, 0 skipped in 33 s\n")
    assert "       9 s  cpu: a::slow\nover its budget  cpu: tests: 30 s of 10\n\n4" in said
