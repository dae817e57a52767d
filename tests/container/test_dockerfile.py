"""Tests properties of the Dockerfile that do not require a build."""

import re
import sys
from pathlib import Path

import pytest

PROJECT = Path(__file__).resolve().parents[2]


def test_every_base_is_named_with_its_registry():
    """Each FROM line contains a registry, a stage or a build argument. Without a registry, podman and buildah ask which
    registry is meant, or fail."""
    bases = re.findall(r"^FROM (\S+)", (PROJECT / "Dockerfile").read_text(), re.MULTILINE)
    registries = ("docker.io/nvidia/", "docker.io/library/")
    stages = ("${BASE_IMAGE:-", "${DEVEL_IMAGE:-", "kernels-${")
    assert len(bases) == 7
    assert all(base.startswith((*registries, *stages)) for base in bases)


def read_lines(name):
    lines = (PROJECT / "requirements" / name).read_text().splitlines()
    return [line for line in lines if line and not line.startswith(("#", "--extra-index-url "))]


@pytest.mark.parametrize("stack", ["torch2.2", "current"])
def test_every_package_of_an_image_is_pinned(stack):
    """All packages have exact versions, and the wheels of the kernels match the torch, CUDA and Python of the stack."""
    pins = read_lines(f"{stack}.txt")
    for line in pins:
        assert re.fullmatch(r'[a-z0-9-]+==[^;\s]+(; python_version (>=|<) "3\.11")?', line), line
    (torch,) = (line for line in pins if line.startswith("torch=="))
    minor = re.match(r"torch==(\d+\.\d+)", torch)[1]
    dockerfile = (PROJECT / "Dockerfile").read_text()
    cuda = re.search(rf"^FROM \S+/cuda:(\d+)\S+ AS devel-{stack}$", dockerfile, re.MULTILINE)[1]
    for line in read_lines(f"kernels-{stack}.txt"):
        built_for = rf"\+cu{cuda}torch{minor}cxx11abi\w+-cp(\d)(\d+)-\S+-linux_(\w+)\.whl"
        asked_by = r'python_version == "\1\.\2"( and platform_machine == "\3")?'
        assert re.fullmatch(rf"\S+ @ https://\S+{built_for} ; {asked_by}", line), line


def test_the_patch_is_for_the_pinned_triton():
    """The patch of Triton is for the pinned version, so raising this version requires a check of the patch."""
    sys.path.insert(0, str(PROJECT / "patches"))
    from apply import PATCHED_VERSION

    assert (
        f"\ntriton=={PATCHED_VERSION}\n" in (PROJECT / "requirements" / "torch2.2.txt").read_text()
    )
