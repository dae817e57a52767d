"""Installs the Python modules of mamba-ssm, without its CUDA kernels, in a cache folder outside the project. Tests call
only the reference functions of mamba-ssm, and never use a GPU."""

import os
import sys
import tempfile
from functools import lru_cache
from pathlib import Path

import pytest

from tests.support.processes import run_program
from tests.support.triton_wheels import NEWEST, fetch

VERSION = "2.3.1"
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mamba_fsdp-tests"


@lru_cache
def mamba_ssm_folder():
    """Returns the folder to put on the path. Installs mamba-ssm at the first use, and skips the test if that is
    impossible."""
    folder = CACHE / f"mamba-ssm-{VERSION}"
    if folder.exists():
        return folder
    CACHE.mkdir(parents=True, exist_ok=True)
    fresh = Path(tempfile.mkdtemp(dir=CACHE))
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", fresh]
    for packages in (
        ["setuptools", "wheel", "packaging", "einops"],
        ["--no-build-isolation", f"mamba-ssm=={VERSION}"],
    ):
        done = run_program(
            *pip,
            *packages,
            PYTHONPATH=str(fresh),
            MAMBA_FORCE_BUILD="TRUE",
            MAMBA_SKIP_CUDA_BUILD="TRUE",
        )
        if done.returncode:
            reason = (done.stderr.strip() or "no reason given").splitlines()[-1]
            pytest.skip(f"mamba-ssm {VERSION} can't be installed here: {reason}")
    try:
        fresh.rename(folder)
    except OSError:
        assert folder.exists(), f"can't rename {fresh} to {folder}"  # another test run was faster
    return folder


def triton_environment():
    """Returns the additional variables of a process that imports mamba-ssm's Triton kernels.

    They need a Triton, and the cpu stack does not contain one. Skips the test if Triton can't be installed.
    """
    return {"PYTHONPATH": str(fetch(NEWEST))}
