"""Tests that apply.py applies the patch once, only to the version of Triton for which it was made, and changes
nothing in any other case."""

import shutil
import subprocess
import sys

import pytest

from tests.support.processes import run_program
from tests.support.triton_wheels import NEWEST, PATCHES, bare_triton_2_2, fetch


def apply(folder, *options):
    """Runs patches/apply.py on the Triton in `folder`. Returns (exit code, output)."""
    done = run_program(sys.executable, PATCHES / "apply.py", f"--site={folder}", *options)
    return done.returncode, done.stdout + done.stderr


@pytest.fixture
def pristine(tmp_path):
    return bare_triton_2_2(tmp_path / "site")


def snapshot(folder):
    return {
        path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()
    }


def test_patch_is_applied_once(pristine):
    """apply.py applies the patch once. A second run detects the patch and changes nothing. With --check, the exit
    code shows whether the patch is applied."""
    assert apply(pristine, "--check")[0] == 1
    assert "put in place" in apply(pristine)[1]
    patched = snapshot(pristine)
    assert apply(pristine, "--check")[0] == 0
    status, output = apply(pristine)
    assert status == 0 and "already in place" in output and snapshot(pristine) == patched


@pytest.mark.parametrize(
    "change",
    [
        "sed -i s/random.randint/random.randrange/ runtime/cache.py",
        "echo > runtime/cache.py",
        "sed -i s/2.2.0/2.3.0/ __init__.py",
        # This version has a setting for the cache manager, but the module lacks it.
        "sed -i s/2.2.0/3.6.0/ __init__.py",
        "echo > __init__.py",
    ],
)
def test_another_version_or_a_changed_module_is_refused(pristine, change):
    """apply.py refuses another version of Triton or a modified module with a reason, and writes nothing."""
    subprocess.run(change, shell=True, check=True, cwd=pristine / "triton")
    before = snapshot(pristine)
    status, output = apply(pristine)
    assert status == 1 and output.startswith("error: ") and snapshot(pristine) == before


def test_a_folder_without_triton_is_refused(tmp_path):
    status, output = apply(tmp_path)
    assert status == 1 and "holds no Triton" in output


@pytest.mark.slow
def test_newer_triton_gets_the_class_only(tmp_path):
    """For a version of Triton with a setting for its cache manager, apply.py adds one file and prints the environment
    variable that enables it."""
    shutil.copytree(fetch(NEWEST) / "triton/runtime", tmp_path / "triton/runtime")
    shutil.copy(fetch(NEWEST) / "triton/__init__.py", tmp_path / "triton")
    before = snapshot(tmp_path)
    status, output = apply(tmp_path)
    assert (
        status == 0
        and "TRITON_CACHE_MANAGER=triton.runtime.rank0_cache:Rank0CacheManager" in output
    )
    assert {path.name for path in set(snapshot(tmp_path)) - set(before)} == {"rank0_cache.py"}
