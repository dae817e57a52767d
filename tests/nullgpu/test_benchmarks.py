"""What a lent GPU is asked, rehearsed on the null device."""

import re

import pytest

pytestmark = [pytest.mark.pinned, pytest.mark.slow]
PARTS = "values,ncu,mamba-1.4b,steps,traces,run"
REFUSED = "UserError: mamba_ssm does not load (ModuleNotFoundError: No module named 'mamba_ssm')"


def test_every_part_of_the_benchmarks_runs_to_its_end(start, tmp_path):
    """Each in a process of its own, on the device. Runs choose the same kernels cold, warm and after a kill."""
    words = [f"--only={PARTS}", "--rehearse", f"--out={tmp_path}"]
    process = start("-m", "benchmarks.gpu", *words)
    stdout, stderr = process.communicate(timeout=600)
    assert process.returncode == 0, stdout + stderr
    said = (tmp_path / "summary.md").read_text().replace(REFUSED, "")
    assert said.startswith("NVIDIA H100") and "| False" not in said and "Error" not in said
    for begun in ("cold, twice", "warm", "killed, resumed"):
        assert re.search(rf"\| {begun} +\| [^|]*\| the same \| the same \|", said), said
