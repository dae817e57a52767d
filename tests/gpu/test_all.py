"""benchmarks.gpu --all: one part that hangs or fails takes no other along, and every part runs through on a CPU."""

import os
import subprocess
import sys

import pytest

from benchmarks.gpu import __main__ as everything


@pytest.mark.slow
def test_each_part_has_its_own_end(tmp_path, monkeypatch):
    monkeypatch.setitem(everything.LIMITS, "operators", 0.1)
    assert everything.run_part("operators", tmp_path, True) == "stopped after 0.1 s"
    monkeypatch.setitem(everything.LIMITS, "no-preset", 60)
    outcome = everything.run_part("no-preset", tmp_path, False)
    assert outcome == "ended with 1, see no-preset.log"
    assert "Traceback" in (tmp_path / "no-preset.log").read_text()


@pytest.mark.slow
def test_it_is_rehearsed_on_a_cpu(tmp_path, project):
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu", "--rehearse", "--out", tmp_path]
        + ["--only=operators,run,mamba2-1.3b"],
        cwd=project,
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    said = (tmp_path / "summary.md").read_text()
    assert "commit" in said and "| ours | " in said and "| mamba_ssm | - |" in said
    assert said.count("| same bits | same bits |") == 2
    assert " no |" not in (tmp_path / "operators.md").read_text()
