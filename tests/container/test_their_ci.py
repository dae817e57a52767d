"""The two commands by which the CI of awslabs/awsome-distributed-ai makes an image of a test case, as README.md types them.

They need a Docker daemon, Enroot, the network and an hour. test_image.py builds the same file with neither.
"""

import re
import shutil
import subprocess

import pytest

from tests.support.processes import run_program


@pytest.mark.slow
@pytest.mark.timeout(9000)
def test_an_image_is_built_and_imported(project, tmp_path):
    """In a folder that has what git has, without the history: so a test case lies in their repository."""
    text = (project / "README.md").read_text()
    build, load = re.findall(r"^(?:docker build -t|enroot import -o) .*$", text, re.MULTILINE)
    missing = [tool for tool in ("docker", "enroot") if shutil.which(tool) is None]
    if missing or run_program("docker", "info").returncode:
        pytest.skip(f"needs {' and '.join(missing) or 'a running Docker daemon'}")
    subprocess.run(
        f"git archive HEAD | tar -x -C '{tmp_path}'", shell=True, cwd=project, check=True
    )
    subprocess.run(build, shell=True, cwd=tmp_path, check=True)
    subprocess.run(load, shell=True, cwd=tmp_path, check=True)
    with open(tmp_path / load.split()[3], "rb") as image:
        assert image.read(4) == b"hsqs"
