"""requirements/build_kernels.sh with stand-ins for pip and git: what it asks them for, and what it says when they fail.

tests/container/test_image.py compiles with the real ones.
"""

import os

import pytest

from tests.support.builder import kernel_versions
from tests.support.processes import run_program, write_program

# `python -m pip wheel ... --wheel-dir FOLDER SOURCES`: runs setup.py, which stands for the compiler.
PYTHON = """#!/bin/sh
for sources; do :; done
while [ "$1" != --wheel-dir ]; do shift; done
python3 "$sources/setup.py" && touch "$2/${sources##*/}.whl"
"""
GIT = """#!/bin/sh
for folder; do :; done
echo "$@" >>"$0.asked"
mkdir "$folder" && cp "${0%/*}/setup.py" "$folder"
"""
SETUP = """\
import os
if True:
    cc_flag = ["-gencode", "arch=compute_75,code=sm_75"]
    # HACK: The compiler flag -D_GLIBCXX_USE_CXX11_ABI
    assert not cc_flag
for wanted in os.environ["TORCH_CUDA_ARCH_LIST"].split():
    print(f"ptxas info    : Compiling entry function 'kernel' for 'sm_{wanted.replace('.', '')}'")
"""


@pytest.fixture
def build(project, tmp_path):
    """build(stack, setup_py) -> the finished process, the wheels' names, the repositories fetched."""

    def run(stack="torch2.2", setup_py=SETUP):
        tools = tmp_path / "tools"
        for name, text in (("python", PYTHON), ("git", GIT), ("nvcc", "#!/bin/sh")):
            write_program(tools / name, text)
        (tools / "setup.py").write_text(setup_py)
        environment = {"PATH": f"{tools}:{os.environ['PATH']}", "PYTHON": str(tools / "python")}
        script = project / "requirements/build_kernels.sh"
        done = run_program(script, stack, "wheels", cwd=tmp_path, **environment)
        requests = (tools / "git.asked").read_text().splitlines()
        fetched = [line.split()[-4:-1] for line in requests]
        return done, sorted(path.stem for path in (tmp_path / "wheels").glob("*.whl")), fetched

    return run


@pytest.mark.parametrize(
    "stack, code", [("torch2.2", "8.0 8.6 8.9 9.0"), ("current", "8.0 8.6 8.9 9.0 10.0 12.0")]
)
def test_the_pinned_versions_are_compiled_for_the_gpus_of_the_stack(build, stack, code):
    done, wheels, fetched = build(stack)
    assert done.returncode == 0, done.stderr
    versions = kernel_versions(stack)
    assert wheels == sorted(versions)
    assert done.stdout.splitlines() == [
        f"compiling {name} {version} for compute capability {code}"
        for name, (_, version) in sorted(versions.items())
    ]
    assert sorted(fetched) == sorted(
        ["--branch", f"v{version}", url]
        for (_, version), url in zip(
            versions.values(),
            ("https://github.com/Dao-AILab/causal-conv1d", "https://github.com/state-spaces/mamba"),
        )
    )


@pytest.mark.parametrize(
    "setup_py, said",
    [
        (SETUP.replace("HACK", "TRICK"), "setup.py has no line like"),
        (
            SETUP + "print('a.cu(7): error: no such type')\nraise SystemExit(1)",
            "error: no such type",
        ),
        (SETUP.replace(".split()", ".replace('8.6', '').split()"), "without code for sm_86"),
    ],
)
def test_what_went_wrong_is_said_in_a_few_lines(build, setup_py, said):
    done, wheels, _ = build(setup_py=setup_py)
    assert done.returncode == 1 and said in done.stderr and "causal-conv1d" in done.stderr, (
        done.stderr
    )
    assert len(done.stderr.splitlines()) <= 4
