"""benchmarks.gpu: one part that hangs or fails takes no other along, and every part runs through on a CPU."""

import gzip
import json
import re
import time
from functools import partial

import pytest
import torch

from benchmarks.gpu import __main__ as everything
from benchmarks.gpu import models, runs, values
from mamba_fsdp.trainer import layer_check
from tests.support.forked import Training


@pytest.mark.slow
def test_each_part_has_its_own_end(tmp_path, monkeypatch):
    monkeypatch.setitem(everything.LIMITS, "values", 0.1)
    assert everything.run_part("values", tmp_path, True) == "stopped after 0.1 s"
    monkeypatch.setitem(everything.LIMITS, "no-preset", 60)
    outcome = everything.run_part("no-preset", tmp_path, False)
    assert outcome == "ended with 1, see no-preset.log"
    assert "Traceback" in (tmp_path / "no-preset.log").read_text()


def test_a_machine_without_the_tools_does_the_rest(tmp_path, monkeypatch):
    """No ncu, no git. All that a call leaves are its logs and a summary."""
    monkeypatch.setattr(everything.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(everything.torch.cuda, "get_device_name", lambda: "a GPU")
    monkeypatch.setattr(everything.torch.version, "cuda", "13.0")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("sys.argv", ["gpu", "--only=ncu,sanitizer", f"--out={tmp_path / 'out'}"])
    (tmp_path / "out").mkdir()
    (tmp_path / "out/sanitizer.md").write_text("| a row |\n")
    assert everything.main() == 1
    (summary,) = (tmp_path / "out").iterdir()
    said = summary.read_text()
    assert said.startswith("a GPU; torch") and "commit not known here" in said
    assert "## ncu: there is no ncu\n" in said
    assert "## sanitizer: there is no compute-sanitizer\n\n| a row |\n" in said


def test_ncu_looks_at_every_kernel_that_is_launched(project):
    assert {"walk", "sweep", "backward", "near", "far", "add_up"} <= set(everything.kernels())
    for operator in project.glob("mamba_fsdp/ops/*/triton.py"):
        source = operator.with_name("triton_kernels.py")
        if source.exists():
            assert any(f"def {name}(" in source.read_text() for name in everything.kernels())


def test_a_model_without_its_kernels_does_not_take_the_others_time(monkeypatch):
    monkeypatch.setattr(models, "LONGEST", 0.01)
    slow = iter([0.0, 0.05])

    def step(tokens):
        time.sleep(next(slow))
        return 1.0

    with pytest.raises(models.UserError, match="a step takes 0 s"):
        models.time_steps(step, torch.zeros(1))


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is asked itself")
@pytest.mark.slow
def test_it_is_rehearsed_on_a_cpu(tmp_path, monkeypatch):
    """Each part but `tests` and `sanitizer`, in this process, timed once."""
    for module in (layer_check, models):
        monkeypatch.setattr(module, "ROUNDS", 1)
    monkeypatch.setattr(models, "STEPS", 1)
    monkeypatch.setattr(values, "POSITIONS", (64, 60))
    monkeypatch.setattr(runs, "start", lambda words: Training(words, {}))
    for name in ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR"):  # which the part changes
        monkeypatch.setenv(name, "")
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    said = ""
    for name in ("values", "ncu", "run", "traces", "mamba-1.4b", "steps"):
        everything.measure_part(name, tmp_path, True)
        said += re.sub(" +", " ", everything.take_table(name, tmp_path))
    assert (
        "| small | 64 | mamba1 | scan | cpp |" in said
        and "| small | 60 | mamba2 |" in said
        and "| False |" not in said
        and "Error" not in said.replace("UserError: its kernels need a GPU", "")
    )
    for start in ("cold, twice", "warm", "killed, resumed"):
        assert re.search(rf"\| {start} \| [^|]* \| the same \| the same \|", said), said
    assert "| ours | " in said and "| mamba_ssm | - |" in said
    for builds in models.OTHER_SETTINGS:
        assert all(f"| 1 | 8 | {title} | " in said for title in builds)
    with gzip.open(tmp_path / "mamba-1.4b.json.gz") as trace:
        assert json.load(trace)["traceEvents"]
    assert [path.name for path in tmp_path.iterdir()] == ["mamba-1.4b.json.gz"]
    assert "commit" in everything.provenance()


def test_each_call_ends_within_ten_minutes():
    """Its parts' limits and 50 seconds of its own; each part belongs to a call."""
    parts = [name for names in everything.CALLS.values() for name in names]
    assert sorted(parts) == sorted(everything.LIMITS)
    for names in everything.CALLS.values():
        assert sum(map(everything.LIMITS.get, names)) <= 550
