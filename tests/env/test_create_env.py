"""0.create_env.sh: quick when there is nothing to do, clear when it can't, and never content with a half-made
environment.

The script runs on a copy of the checkout's files with a requirements list that needs no download.
"""

import os
import shutil
import subprocess
import sys
import zipfile

import pytest

from tests.support.processes import run_program, write_program
from tests.support.terminal import drawings

# A project that pip installs without setuptools.
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
    """An interpreter whose `-m venv` copies an environment that is there, where the true one takes seconds."""
    folder = tmp_path_factory.mktemp("python")
    subprocess.run([sys.executable, "-m", "venv", folder / "venv"], check=True)
    script = f"""#!/bin/sh
if [ "$1 $2" = "-m venv" ]; then exec cp -r '{folder}/venv' "$3"; fi
exec '{sys.executable}' "$@"
"""
    return str(write_program(folder / "python", script))


@pytest.fixture
def create(project, tmp_path, quick_python, monkeypatch):
    """create(*words, **environment) -> the finished process, in tmp_path."""
    shutil.copy(project / "0.create_env.sh", tmp_path)
    (tmp_path / "pyproject.toml").write_text(PYPROJECT)
    (tmp_path / "backend.py").write_text(BACKEND)
    (tmp_path / "requirements").mkdir()
    for name in ("cpu", "current", "torch2.2", "dev"):
        (tmp_path / "requirements" / f"{name}.txt").write_text("# nothing\n")
    # A disk with room, whatever this machine's has:
    monkeypatch.setenv(
        *stub(tmp_path / "room", "df", "echo head; echo 'disk 9 0 99000000 0% /'").popitem()
    )

    def run(*words, **environment):
        environment = {"PYTHON": quick_python, **environment}
        return run_program("./0.create_env.sh", *words, cwd=tmp_path, **environment)

    return run


def one_error(done, *words):
    assert done.returncode == 1 and "Traceback" not in done.stderr, done
    assert done.stderr.startswith("error: ") and len(done.stderr.splitlines()) == 2, done.stderr
    assert all(word in done.stderr for word in words), done.stderr


def stub(folder, name, body):
    write_program(folder / name, f"#!/bin/sh\n{body}\n")
    return {"PATH": f"{folder}:{os.environ['PATH']}"}


@pytest.mark.slow
def test_made_once_then_left_alone_until_something_changes(create, tmp_path):
    first = create("--stack", "cpu", PYTHON=sys.executable)
    assert first.returncode == 0 and "making" in first.stdout, first
    marker = tmp_path / ".venv" / "mine"
    marker.touch()
    second = create("--stack", "cpu")
    assert second.stdout == ".venv is complete: stack cpu\n" and marker.exists()
    (tmp_path / "requirements" / "cpu.txt").write_text("# another list\n")
    assert "making" in create("--stack", "cpu").stdout and not marker.exists()
    assert "making" in create("--stack", "torch2.2").stdout  # one folder, another stack


@pytest.mark.slow
def test_what_pip_does_is_seen_in_one_line_of_a_terminal(create, quick_python, tmp_path, terminal):
    """And in a log as one line of a group of packages, not as pip's hundreds."""
    create("--help")
    wheels = []
    for number in range(3):
        wheel = tmp_path / f"package_with_quite_a_long_name_{'x' * 40}_{number}-1-py3-none-any.whl"
        name, wheels = wheel.name.split("-")[0], [*wheels, wheel]
        with zipfile.ZipFile(wheel, "w") as file:
            file.writestr(
                f"{name}-1.dist-info/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n"
            )
            file.writestr(
                f"{name}-1.dist-info/WHEEL",
                "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
            )
            file.writestr(f"{name}-1.dist-info/RECORD", "")
    (tmp_path / "requirements" / "cpu.txt").write_text("".join(f"{wheel}\n" for wheel in wheels))
    process = terminal.start(
        ["./0.create_env.sh", "--stack", "cpu"],
        cwd=tmp_path,
        env={**os.environ, "PYTHON": quick_python},
    )
    assert process.wait(600) == 0
    rows = drawings(terminal.text())
    assert rows[1].startswith("  an environment of Python 3")
    assert rows[2].startswith("  1: package_with_quite")
    rows = [row for row in rows if not row.endswith(" of 3")]  # seen where it takes seconds
    assert rows[-2:] == ["  installing 3 packages", ".venv is complete: stack cpu"]
    assert all(len(row) < 80 for row in rows), rows
    shutil.rmtree(tmp_path / ".venv")
    assert create("--stack", "cpu").stdout.splitlines()[1:] == rows[-2:]


@pytest.mark.slow
def test_a_half_made_environment_is_made_again(create, tmp_path):
    (tmp_path / "requirements" / "cpu.txt").write_text("/nowhere/package-1-py3-none-any.whl\n")
    one_error(create("--stack", "cpu"), "could not install requirements/cpu.txt", "install.log")
    assert not (tmp_path / ".venv" / ".complete").exists()
    (tmp_path / "requirements" / "cpu.txt").write_text("# mended\n")
    assert "making" in create("--stack", "cpu").stdout
    assert (tmp_path / ".venv" / ".complete").read_text().startswith("cpu\n")


@pytest.mark.slow
def test_no_network_is_said(create, tmp_path):
    (tmp_path / "requirements" / "cpu.txt").write_text("fire==0.7.1\n")
    offline = {
        "PIP_INDEX_URL": "http://127.0.0.1:9/simple",
        "PIP_EXTRA_INDEX_URL": "",
        "PIP_FIND_LINKS": "",
        "PIP_RETRIES": "0",
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_NO_CACHE_DIR": "1",
        "PIP_TIMEOUT": "2",
    }
    one_error(create("--stack", "cpu", **offline), "no network")


def test_no_python_is_said(create):
    one_error(
        create("--stack", "cpu", PYTHON="/nowhere/python3"),
        "Python 3.10",
        "apt-get install python3",
    )


def test_an_old_python_is_not_taken(create, tmp_path):
    path = stub(tmp_path / "bin", "oldpython", "exit 1")
    one_error(create("--stack", "cpu", PYTHON="oldpython", **path), "no Python 3.10")


def test_no_space_is_said(create, tmp_path):
    path = stub(tmp_path / "bin", "df", "echo head; echo 'disk 100 90 1500000 90% /'")
    one_error(create("--stack", "cpu", **path), "1 GB free", "needs 3 GB")


@pytest.mark.parametrize("words", [("--stack", "rocm"), ("--stak", "cpu")])
def test_mistakes_are_named(create, words):
    one_error(create(*words), words[1] if words[0] == "--stack" else words[0])


def test_a_driver_means_the_current_stack(create, tmp_path):
    stub(tmp_path / "bin", "nvidia-smi", "exit 0")
    path = stub(tmp_path / "bin", "df", "echo head; echo 'disk 100 90 0 90% /'")
    one_error(create(**path), "the current stack")


@pytest.mark.slow
def test_the_libraries_kernels_come_where_they_are_asked_for(create, tmp_path):
    """Not by themselves, also later, and not where they are wrong."""
    (tmp_path / "requirements" / "kernels-current.txt").write_text(
        "/nowhere/kernels-1-py3-none-any.whl\n"
    )
    (tmp_path / "patches").mkdir()
    (tmp_path / "patches" / "apply.py").touch()
    path = stub(tmp_path / "bin", "nvidia-smi", "echo NVIDIA H100 80GB HBM3")
    assert create(**path).stdout.endswith("complete: stack current\n")
    one_error(
        create(INSTALL_KERNELS="1", **path), "could not install requirements/kernels-current.txt"
    )
    path = stub(tmp_path / "bin", "nvidia-smi", "echo NVIDIA B300 SXM6 AC")
    done = create(INSTALL_KERNELS="1", **path)
    assert done.returncode == 0 and "without mamba-ssm and causal-conv1d" in done.stdout, done
    assert create(INSTALL_KERNELS="1", **path).stdout == ".venv is complete: stack current\n"
    one_error(
        create("--stack", "cpu", INSTALL_KERNELS="1"), "no compiled kernels for the cpu stack"
    )
