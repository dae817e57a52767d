"""What a lent GPU is asked, rehearsed on the null device."""

import re

import pytest

pytestmark = [pytest.mark.pinned, pytest.mark.slow]
ABSENT = r"(UserError: )?mamba_ssm does not load \(ModuleNotFoundError: [^)]*\)"


def test_every_part_of_the_benchmarks_runs_to_its_end(start, tmp_path):
    """Runs choose the same kernels at their second start, warm and after a kill."""
    process = start("-m", "tests.support.nullgpu.rehearsal", tmp_path)
    stdout, stderr = process.communicate(timeout=1200)
    assert process.returncode == 0, stderr
    said = re.sub(f" +|{ABSENT}", " ", stdout)
    assert said.startswith("NVIDIA H100") and "| False |" not in said and "Error" not in said
    for begun in ("cold, twice", "warm", "killed, resumed"):
        assert re.search(rf"\| {begun} \| [^|]* \| the same \| the same \|", said), said
