"""Tests the errors of requirements/build_kernels.sh if a kernel can't be compiled, with replacements for pip and git.

tests/container/test_image.py compiles with the real ones.
"""

import os

import pytest

from tests.support.processes import run_program, write_program

# This program replaces `python -m pip wheel ... SOURCES`. It runs setup.py, which prints the messages of a compiler.
PYTHON = """#!/bin/sh
for sources; do :; done
python3 "$sources/setup.py"
"""
GIT = """#!/bin/sh
for folder; do :; done
mkdir "$folder" && cp "${0%/*}/setup.py" "$folder"
"""
SETUP = """\
import os
if True:
    # HACK: The compiler flag -D_GLIBCXX_USE_CXX11_ABI
    pass
for wanted in os.environ["TORCH_CUDA_ARCH_LIST"].split():
    print(f"ptxas info    : Compiling entry function 'kernel' for 'sm_{wanted.replace('.', '')}'")
"""


@pytest.mark.parametrize(
    "setup_py, message",
    [
        (SETUP.replace("HACK", "TRICK"), "setup.py has no line like"),
        (SETUP + "raise SystemExit('error: no such type')", "no such type"),
        (SETUP.replace(".split()", ".replace('8.6', '').split()"), "without code for sm_86"),
    ],
)
def test_an_error_has_only_a_few_lines(project, tmp_path, setup_py, message):
    for name, text in (("python", PYTHON), ("git", GIT), ("nvcc", "#!/bin/sh")):
        write_program(tmp_path / name, text)
    (tmp_path / "setup.py").write_text(setup_py)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHON": str(tmp_path / "python")}
    script = project / "requirements/build_kernels.sh"
    done = run_program(script, "torch2.2", tmp_path / "wheels", **environment)
    assert done.returncode == 1 and message in done.stderr and "causal-conv1d" in done.stderr, done
    assert len(done.stderr.splitlines()) <= 4
