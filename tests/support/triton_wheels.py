"""Installs versions of Triton for the tests of its cache, which do not need torch."""

from pathlib import Path

import pytest

from benchmarks.kernels.install import triton_folder

PATCHES = Path(__file__).resolve().parents[2] / "patches"
PATCHED, NEWEST = "2.2.0", "3.9.0"


def fetch(version):
    """Returns the folder of a Triton that is kept between test runs. Skips the test if it can't be installed."""
    try:
        return triton_folder(version)
    except OSError as error:
        pytest.skip(str(error))


def bare_triton_2_2(folder):
    """Returns Triton 2.2.0 reduced to its cache module, because the whole package would import torch."""
    runtime = folder / "triton" / "runtime"
    runtime.mkdir(parents=True)
    (folder / "triton" / "__init__.py").write_text(f"__version__ = '{PATCHED}'\n")
    (runtime / "__init__.py").touch()
    (runtime / "cache.py").write_bytes((fetch(PATCHED) / "triton/runtime/cache.py").read_bytes())
    return folder


def cache_manager_environment(version):
    return {
        "PYTHONPATH": f"{fetch(version)}:{PATCHES}",
        "TRITON_CACHE_MANAGER": "rank0_cache:Rank0CacheManager",
    }
