"""benchmarks.gpu --all: one part that hangs or fails takes no other along, and every part runs through on a CPU."""

import os
import subprocess
import sys

import pytest
import torch

from benchmarks.gpu import __main__ as everything
from benchmarks.gpu import models
from config.model_config import ModelConfig
from mamba_fsdp.model.init import initial_value
from mamba_fsdp.model.spec import parameters


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


def test_another_model_is_noted(monkeypatch):
    """A model that starts from other weights is no comparison: the table says so. One that fails says why."""

    def other(config, weights, device):
        return models.our_step(
            config, {name: 1.5 * value for name, value in weights.items()}, device
        )

    monkeypatch.setattr(
        models,
        "MODELS",
        {"ours": models.our_step, "other": other, "mamba_ssm": models.mamba_ssm_step},
    )
    monkeypatch.setattr(models, "STEPS", 1)
    config = ModelConfig(**models.TINY)
    weights = {
        name: initial_value(name, parameter, 0) for name, parameter in parameters(config).items()
    }
    ours, other_row, failed = models.compare(config, weights, torch.arange(18).view(2, 9))
    assert ours["x ours"] == "1.00" and not ours["note"]
    assert "not the same model" in other_row["note"]
    assert failed["note"] == "UserError: its kernels need a GPU" and failed["tokens/s"] == "-"
