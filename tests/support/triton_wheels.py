"""Tritons for the tests of their caches, which need no torch."""

from pathlib import Path

import pytest

from benchmarks.kernels.install import triton_folder

PATCHES = Path(__file__).resolve().parents[2] / "patches"
PATCHED, NEWEST = "2.2.0", "3.9.0"


def fetch(version):
    """The folder of a Triton, kept between runs. Skips the test where it can't be installed."""
    try:
        return triton_folder(version)
    except OSError as error:
        pytest.skip(str(error))


def bare_triton_2_2(folder):
    """Triton 2.2.0 reduced to its cache module: its package would import torch."""
    runtime = folder / "triton" / "runtime"
    runtime.mkdir(parents=True)
    (folder / "triton" / "__init__.py").write_text(f"__version__ = '{PATCHED}'\n")
    (runtime / "__init__.py").touch()
    (runtime / "cache.py").write_bytes((fetch(PATCHED) / "triton/runtime/cache.py").read_bytes())
    return folder


def with_class(version):
    return {
        "PYTHONPATH": f"{fetch(version)}:{PATCHES}",
        "TRITON_CACHE_MANAGER": "rank0_cache:Rank0CacheManager",
    }
