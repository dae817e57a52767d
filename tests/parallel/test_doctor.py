"""The doctor says that an environment is whole only when it is."""

import sys

import pytest

from mamba_fsdp.launch import machine
from mamba_fsdp.verbs import checks
from mamba_fsdp.verbs.checks import Check, Finding
from tests.support.processes import run_program

pytestmark = pytest.mark.torch22


@pytest.mark.slow
def test_a_broken_environment_is_named_and_the_rest_told(project, tmp_path):
    """A package that can't be imported fails; all else is told."""
    (tmp_path / "datasets").mkdir()
    (tmp_path / "datasets" / "__init__.py").write_text("raise ImportError('broken on purpose')\n")
    command = [sys.executable, "-m", "mamba_fsdp", "doctor"]
    done = run_program(*command, cwd=project, PYTHONPATH=str(tmp_path), OMP_NUM_THREADS="1")
    assert done.returncode == 1 and not done.stderr
    lines = {line[5:21].strip(): (line[:5].strip(), line[21:]) for line in done.stdout.splitlines()}
    assert lines["packages"][0] == "FAIL"
    assert lines["packages"][1].startswith("ImportError: broken on purpose (")
    assert lines["operators"][0] == "ok" and "scan" in lines["operators"][1]


def test_efa_devices_need_the_library_that_uses_them(monkeypatch):
    find = Check("EFA plugin", checks.find_efa_plugin)
    assert find.make() == Finding("-", "no EFA devices")
    monkeypatch.setattr(checks, "efa_devices", lambda: 4)
    monkeypatch.setattr(machine, "find_library", lambda name: None)
    assert find.make().verdict == "FAIL"
    monkeypatch.setattr(machine, "find_library", lambda name: f"lib{name}.so")
    assert find.make() == Finding("ok", "libnccl-net.so")


@pytest.mark.parametrize(
    ("driver", "assigned", "verdicts"),
    [([], 0, "--"), (["NVIDIA A100"], 1, "ok FAIL"), (["NVIDIA A100"], 2, "FAIL FAIL")],
)
def test_gpus_that_torch_or_slurm_see_differently_fail(driver, assigned, verdicts, monkeypatch):
    monkeypatch.setattr(machine, "driver_gpus", lambda: driver)
    monkeypatch.setattr(machine, "assigned_gpus", lambda: assigned)
    found = [Check("GPUs", find).make() for find in (checks.find_gpus, checks.find_torch_gpus)]
    assert [each.verdict for each in found] == verdicts.replace("--", "- -").split()
