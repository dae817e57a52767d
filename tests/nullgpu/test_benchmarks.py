"""Runs the benchmarks for a GPU on the null device."""

import re

import pytest

pytestmark = [pytest.mark.pinned, pytest.mark.slow]
ABSENT = r"(UserError: )?mamba_ssm does not load \(ModuleNotFoundError: [^)]*\)"


def test_every_part_of_the_benchmarks_runs_to_its_end(run, tmp_path):
    """All parts of benchmarks.gpu finish without an error. Runs select the same kernels at their second start, with a
    filled cache and after a kill."""
    code, output = run("-m", "tests.support.nullgpu.rehearsal", tmp_path)
    assert code == 0, output
    tables = re.sub(f" +|{ABSENT}", " ", output)
    assert "NVIDIA H100" in tables and "| False |" not in tables and "Error" not in tables
    for begun in ("cold, twice", "warm", "killed, resumed"):
        assert re.search(rf"\| {begun} \| [^|]* \| the same \| the same \|", tables), tables
