"""What does not grow with the data, and what is read of it, counted; benchmarks/loader.py adds the times."""

import re
import subprocess
import sys

import pytest

from benchmarks.loader import cold_bytes, write_sparse, write_store

pytestmark = pytest.mark.slow


def test_a_store_of_a_million_million_tokens_fits_into_little_memory(tmp_path, project):
    """Opened, and read in a thousand places: under 200 MiB."""
    command = [
        sys.executable,
        "-m",
        "benchmarks.loader",
        f"--huge={write_sparse(tmp_path / 'sparse')}",
    ]
    said = subprocess.run(command, cwd=project, check=True, capture_output=True, text=True).stdout
    assert said.startswith("a sparse store of 1e+12 tokens")
    assert int(re.search(r"peak memory (\d+) MiB", said)[1]) < 200


def test_two_processes_read_each_byte_of_a_cold_store_once(tmp_path, project, monkeypatch):
    """By the kernel's count of what it fetched from the disk for them."""
    monkeypatch.chdir(project)
    write_store(tmp_path / "store", 10_000_000)
    size, read = cold_bytes(tmp_path / "store", ranks=2)
    if not read:
        pytest.skip("this file system does not tell what it reads from a disk")
    assert 0.9 * size < read < 1.2 * size  # with what it had to read of Python anew
