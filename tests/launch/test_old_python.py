"""Tests that the programs which run on a cluster's own Python need no packages, and no syntax or library newer than
Python 3.6."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.processes import run_program
from tests.support.projects import PROJECT

ENTRIES = [
    "mamba_fsdp/launch/job.py",
    "mamba_fsdp/launch/tokenize_job.py",
    "mamba_fsdp/launch/node_guard.py",
]
IMPORTED = """
import json, runpy, sys
sys.argv = ["job"]
sys.path.insert(0, {folder!r})
module = runpy.run_path({entry!r}, run_name="imported")
print(json.dumps([getattr(module, "__file__", "") or "" for module in list(sys.modules.values())]))
"""


@pytest.fixture(scope="module")
def files():
    """Returns the project's files that these programs import."""
    found = {PROJECT / entry for entry in ENTRIES}
    for entry in ENTRIES:
        script = IMPORTED.format(folder=str(PROJECT), entry=str(PROJECT / entry))
        done = subprocess.run([sys.executable, "-I", "-c", script], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        names = json.loads(done.stdout)
        found |= {Path(name) for name in names if name.startswith(f"{PROJECT}/mamba_fsdp/")}
    return sorted(found)


def test_they_import_few_modules_of_the_package_and_no_others(files):
    """The programs import only launch/ and a few files of run/. In particular, mamba_fsdp/__init__.py must not import
    other modules eagerly, because they need packages."""
    names = {str(file.relative_to(PROJECT / "mamba_fsdp")) for file in files}
    outside = {name for name in names if not name.startswith("launch/")}
    assert outside == {"__init__.py", "run/__init__.py", "run/names.py", "run/node_record.py"}
    assert "launch/slurm_training.py" in names


def test_they_use_nothing_newer_than_python_3_6(files):
    vermin = Path(sys.executable).with_name("vermin")
    if not vermin.exists():
        pytest.skip("vermin is not installed: ./0.create_env.sh --dev")
    words = ["--target=3.6-", "--violations", "--no-tips", "--eval-annotations"]
    done = run_program(vermin, *words, *files)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    "script, beside", [("1.train.sbatch", "training.py"), ("2.tokenize.sbatch", "get_dataset.py")]
)
def test_a_host_without_python_is_an_error(project, tmp_path, script, beside):
    for name in ("bash", "dirname", "readlink"):
        (tmp_path / name).symlink_to(shutil.which(name))
    copy = tmp_path / "project"
    copy.mkdir()
    for name in (script, beside):
        shutil.copy(project / name, copy)
    done = run_program(copy / script, PATH=str(tmp_path))
    assert done.returncode == 2
    assert done.stderr == (
        "error: a job needs Python 3.6 or newer, but PATH has no python3; load it first, for example: module load python\n"
    )


def test_an_old_python_is_an_error(project, monkeypatch):
    script = "import runpy, sys; sys.version_info = (3, 5, 2); runpy.run_path(sys.argv[1], run_name='__main__')"
    done = run_program(sys.executable, "-c", script, project / ENTRIES[0])
    assert done.returncode == 2 and "but a job needs 3.6 or newer" in done.stderr
    assert len(done.stderr.splitlines()) == 1
