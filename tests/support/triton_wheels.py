"""Triton's own cache modules out of its wheels, which are fetched once and kept in the user's cache folder."""

import contextlib
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import pytest

PATCHES = Path(__file__).resolve().parents[2] / "patches"
PATCHED, NEWEST = "2.2.0", "3.9.0"
WANTED = {
    True: (
        "triton/runtime/cache.py",
    ),  # of the patched one a plain file is enough; the newest really compiles
    False: (
        ".py",
        "libtriton.so",
        "libdevice.10.bc",
        "ptxas",
        "ptxas-blackwell",
        "entry_points.txt",
        "METADATA",
    ),
}


def fetch(version):
    """A folder with what the tests need of Triton's wheel, kept between runs. Skips the test when there is no such
    wheel."""
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mamba-fsdp-tests"
    python = (
        "3.10" if version == PATCHED else f"3.{sys.version_info.minor}"
    )  # of 2.2.0 only one plain Python file is used
    folder = caches / f"triton-{version}-{python}"
    if folder.exists():
        return folder
    caches.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=caches) as scratch:
        pip = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--quiet",
            "--no-deps",
            "--only-binary=:all:",
            "--dest",
            scratch,
        ]
        done = subprocess.run(
            [*pip, f"--python-version={python}", f"triton=={version}"],
            capture_output=True,
            text=True,
        )
        if done.returncode:
            pytest.skip(
                f"Triton {version} can't be fetched: {(done.stderr.strip().splitlines() or ['pip failed'])[-1]}"
            )
        with zipfile.ZipFile(next(Path(scratch).glob("*.whl"))) as wheel:
            for name in wheel.namelist():
                if name.endswith(WANTED[version == PATCHED]):
                    Path(wheel.extract(name, f"{scratch}/tree")).chmod(0o755)
        with contextlib.suppress(OSError):  # another test was faster
            os.rename(f"{scratch}/tree", folder)
    return folder


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
