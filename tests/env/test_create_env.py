"""Tests 0.create_env.sh: it does nothing if the environment is complete, creates it again otherwise, and reports
errors.

The script runs in a copy of the checkout with requirements that need no download.
"""

import os
import shutil
import subprocess
import sys

import pytest

from tests.support.processes import run_program, write_program

# A project that pip can install without setuptools.
PYPROJECT = """
[build-system]
requires = []
build-backend = "backend"
backend-path = ["."]
"""
BACKEND = """
import zipfile

def build_editable(folder, settings=None, metadata=None):
    with zipfile.ZipFile(f"{folder}/project-1-py3-none-any.whl", "w") as wheel:
        wheel.writestr("project-1.dist-info/METADATA", "Metadata-Version: 2.1\\nName: project\\nVersion: 1\\n")
        wheel.writestr("project-1.dist-info/WHEEL", "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n")
        wheel.writestr("project-1.dist-info/RECORD", "")
    return "project-1-py3-none-any.whl"
"""


@pytest.fixture(scope="session")
def quick_python(tmp_path_factory):
    """Returns the path of a Python whose `-m venv` copies an existing environment, because the real command takes
    seconds."""
    folder = tmp_path_factory.mktemp("python")
    subprocess.run([sys.executable, "-m", "venv", folder / "venv"], check=True)
    script = f"""#!/bin/sh
if [ "$1 $2" = "-m venv" ]; then exec cp -r '{folder}/venv' "$3"; fi
exec '{sys.executable}' "$@"
"""
    return str(write_program(folder / "python", script))


@pytest.fixture
def create(project, tmp_path, monkeypatch, request):
    """Returns a function create(*arguments, **environment), which runs the script in tmp_path and returns the
    finished process."""
    shutil.copy(project / "0.create_env.sh", tmp_path)
    (tmp_path / "pyproject.toml").write_text(PYPROJECT)
    (tmp_path / "backend.py").write_text(BACKEND)
    (tmp_path / "requirements").mkdir()
    for name in ("cpu", "current", "torch2.2", "dev"):
        (tmp_path / "requirements" / f"{name}.txt").write_text("# nothing\n")
    # The output of df shows a disk with enough space, whatever the disk of this machine.
    monkeypatch.setenv(
        *stub(tmp_path / "room", "df", "echo head; echo 'disk 9 0 99000000 0% /'").popitem()
    )

    def run(*arguments, **environment):
        if "PYTHON" not in environment:
            environment["PYTHON"] = request.getfixturevalue("quick_python")
        return run_program("./0.create_env.sh", *arguments, cwd=tmp_path, **environment)

    return run


def stub(folder, name, body):
    write_program(folder / name, f"#!/bin/sh\n{body}\n")
    return {"PATH": f"{folder}:{os.environ['PATH']}"}


@pytest.mark.slow
def test_an_environment_is_made_once_and_again_when_something_changes_or_it_is_half_made(
    create, tmp_path
):
    """An existing environment is used again, unless the requirements have changed or the last installation failed.

    PYTHONHOME and PYTHONPATH can contain folders of another Python, because a cluster's module files set them.
    """
    listed = tmp_path / "requirements/cpu.txt"
    complete = tmp_path / ".venv/.complete"
    (tmp_path / "other/pip").mkdir(parents=True)
    (tmp_path / "other/pip/__init__.py").write_text("raise ImportError('of another Python')")
    others = {"PYTHONHOME": "/nonsense", "PYTHONPATH": str(tmp_path / "other")}
    first = create("--stack=cpu", **others)
    assert first.returncode == 0 and "making" in first.stdout, first
    marker = tmp_path / ".venv/mine"
    marker.touch()
    second = create("--stack", "cpu")
    assert second.stdout == ".venv is complete: stack cpu\n" and marker.exists()
    listed.write_text("/nowhere/package-1-py3-none-any.whl\n")
    failed = create("--stack", "cpu")
    assert failed.returncode == 1 and len(failed.stderr.splitlines()) == 2, failed
    assert failed.stderr.startswith("error: pip could not install requirements/cpu.txt")
    assert not complete.exists() and not marker.exists()
    listed.write_text("# fixed\n")
    assert "making" in create("--stack", "cpu").stdout
    assert complete.read_text().startswith("cpu\n")


H100 = "9.0"
B200 = "10.0"


@pytest.mark.parametrize(
    "cuda, gpu, arguments, stack, warning",
    [
        ("13.0", H100, (), "current", ""),
        ("12.4", H100, (), "torch2.2", ""),
        ("12.8", B200, (), None, "error: the NVIDIA driver runs CUDA 12.8, which is too old for"),
        ("12.4", H100, ("--stack=current",), "current", "CUDA 12.4; --stack torch2.2 does\n"),
        ("11.4", H100, ("--stack=torch2.2",), "torch2.2", "CUDA 11.4; update the driver\n"),
        ("11.4", H100, ("--stack=cpu",), "cpu", ""),
    ],
)
def test_the_stack_fits_the_driver(create, tmp_path, cuda, gpu, arguments, stack, warning):
    """The default stack is the newest one that the NVIDIA driver supports. If the driver is too old for a given
    stack, a warning is printed. The CUDA version that a stack needs is read from its requirements.

    The environment is not created in this test, because no Python is found.
    """
    for name, version in (("current", "runtime==13.0.96"), ("torch2.2", "runtime-cu12==12.1.105")):
        line = f'nvidia-cuda-{version}; python_version < "3"\n'
        (tmp_path / "requirements" / f"{name}.txt").write_text(line)
    header = f"| NVIDIA-SMI 550.54.15   Driver Version: 550.54.15   CUDA Version: {cuda}     |"
    body = f'case $* in *compute_cap*) echo {gpu} ;; *) echo "{header}" ;; esac'
    environment = stub(tmp_path / "driver", "nvidia-smi", body)
    done = create(*arguments, PYTHON="/nowhere/python3", **environment)
    if stack:
        assert done.stdout.startswith(f"making .venv for the {stack} stack")
        assert "error: no Python 3.10" in done.stderr and "apt-get install" in done.stderr
    assert warning in done.stderr
    assert done.stderr.count("\n") == 2 + bool(stack and warning)
