"""What can be said of the Dockerfile without building it."""

import re
import shutil
import sys
from pathlib import Path

import pytest

from tests.support.processes import run_program

PROJECT = Path(__file__).resolve().parents[2]


def test_hadolint_is_content():
    tool = shutil.which("hadolint", path=str(Path(sys.executable).parent)) or shutil.which(
        "hadolint"
    )
    if tool is None:
        pytest.skip("hadolint is not installed: pip install -r requirements/dev.txt")
    done = run_program(tool, PROJECT / "Dockerfile")
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_base_is_named_with_its_registry():
    """podman and buildah ask which one is meant, or refuse."""
    bases = re.findall(r"^FROM (\S+)", (PROJECT / "Dockerfile").read_text(), re.MULTILINE)
    registries = ("docker.io/nvidia/", "docker.io/library/")
    stages = ("${BASE_IMAGE:-", "${DEVEL_IMAGE:-", "kernels-${")
    assert len(bases) == 7
    assert all(base.startswith((*registries, *stages)) for base in bases)


@pytest.mark.parametrize("stack", ["torch2.2", "current"])
def test_every_package_of_an_image_is_pinned(stack):
    """One version per package and Python, and wheels of the kernels for exactly the stack's torch."""
    pins = {}
    for line in (PROJECT / "requirements" / f"{stack}.txt").read_text().splitlines():
        if line and not line.startswith(("#", "--extra-index-url ")):
            match = re.fullmatch(
                r'([a-z0-9-]+)==([^;\s]+)(; python_version (?:>=|<) "3\.11")?', line
            )
            assert match, f"not a pin: {line}"
            assert (match[1], match[3]) not in pins and not (
                match[3] and (match[1], None) in pins
            ), f"twice: {line}"
            pins[match[1], match[3]] = match[2]
    torch = ".".join(pins["torch", None].split(".")[:2])
    bases = re.findall(
        r"^FROM \S+/cuda:(\d+)\S+ AS devel-(\S+)",
        (PROJECT / "Dockerfile").read_text(),
        re.MULTILINE,
    )
    cuda = {of: major for major, of in bases}[stack]
    kernels = [
        line
        for line in (PROJECT / "requirements" / f"kernels-{stack}.txt").read_text().splitlines()
        if not line.startswith("#")
    ]
    assert kernels
    for line in kernels:
        match = re.fullmatch(
            rf"(\S+) @ https://github\.com/\S+/v(\S+?)/(\w+)-\2\+cu{cuda}torch{re.escape(torch)}"
            r"cxx11abi\w+-cp(\d)(\d+)-\S+-linux_(\w+)\.whl ; "
            r'python_version == "\4\.\5"( and platform_machine == "\6")?',
            line,
        )
        assert match, f"not a pinned wheel: {line}"
        name, _, file_name, _, _, machine, is_marked = match.groups()
        assert name.replace("-", "_") == file_name, line
        assert is_marked or machine == "x86_64", line


def test_the_patch_is_for_the_pinned_triton():
    """Raising Triton's version without a look at the patch is noticed here, not in a build."""
    sys.path.insert(0, str(PROJECT / "patches"))
    from apply import PATCHED_VERSION

    assert (
        f"\ntriton=={PATCHED_VERSION}\n" in (PROJECT / "requirements" / "torch2.2.txt").read_text()
    )
