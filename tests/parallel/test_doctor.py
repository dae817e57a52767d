"""The doctor says that an environment is whole only when it is, on one machine and on several nodes."""

import contextlib
import io
import os
import subprocess
import sys
from unittest.mock import patch

import pytest

from mamba_fsdp.launch import machine
from mamba_fsdp.verbs import checks, doctor
from mamba_fsdp.verbs.checks import Check, Finding
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.torch22


@pytest.mark.slow
def test_a_broken_environment_is_named_and_the_rest_told(project, tmp_path):
    """A package that can't be imported fails; all else is told, and a folder that is not there is not made."""
    (tmp_path / "datasets").mkdir()
    (tmp_path / "datasets" / "__init__.py").write_text("raise ImportError('broken on purpose')\n")
    done = subprocess.run(
        [sys.executable, "-m", "mamba_fsdp", "doctor", str(tmp_path / "nowhere")],
        cwd=project,
        env={**os.environ, "PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1 and not done.stderr
    lines = {line[5:21].strip(): (line[:5].strip(), line[21:]) for line in done.stdout.splitlines()}
    assert {name for name, (verdict, _) in lines.items() if verdict == "FAIL"} >= {
        "packages",
        "folder",
    }
    assert lines["packages"][1].startswith("ImportError: broken on purpose (")
    assert not (tmp_path / "nowhere").exists()
    assert lines["operators"][0] == "ok" and "scan" in lines["operators"][1]


def as_ranks(world):
    """Each is a node of its own, and finds something of its own."""
    world.local_rank = 0
    said = io.StringIO()
    with (
        patch.object(doctor, "MEGABYTES", 1),
        patch.object(machine, "node_name", lambda: f"node{world.rank}"),
        contextlib.redirect_stdout(said),
    ):
        failed = [
            doctor.print_findings(world, "GPUs", Finding("ok", "the same")),
            doctor.print_findings(world, "EFA", Finding("FAIL", f"{world.rank} devices")),
        ]
        speed = doctor.measure_ranks(world)
    return failed, said.getvalue().splitlines(), speed


@pytest.mark.slow
def test_nodes_are_told_apart_and_their_speed_measured():
    (failed, lines, speed), others = run_ranks(2, as_ranks)
    assert failed == [False, True] and others[:2] == ([False, False], [])
    assert lines == [
        "ok   GPUs            the same",
        "FAIL EFA             node0: 0 devices",
        "FAIL EFA             node1: 1 devices",
    ]
    assert speed.startswith("2 over gloo: all-reduce of 1 MB ")


def test_srun_says_who_a_task_is(monkeypatch):
    step = {
        "SLURM_STEP_NUM_TASKS": "4",
        "SLURM_PROCID": "3",
        "SLURM_LOCALID": "1",
        "SLURM_STEP_ID": "2",
        "SLURM_STEP_NODELIST": "gpu-[07-08],other",
        "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
        "SLURM_JOB_ID": "12345",
    }
    monkeypatch.setattr(os, "environ", dict(step))
    monkeypatch.setattr(
        machine, "interface_towards", lambda hosts: "eth7" if hosts[0] == "gpu-07" else ""
    )
    doctor.join_step()
    added = {name: os.environ[name] for name in os.environ.keys() - step.keys()}
    assert 20000 <= int(added.pop("MASTER_PORT")) < 30000
    assert added == {
        "RANK": "3",
        "WORLD_SIZE": "4",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "gpu-07",
        "GLOO_SOCKET_IFNAME": "eth7",
    }


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


def test_a_folder_is_measured_and_left_as_it_was(tmp_path, monkeypatch):
    monkeypatch.setattr(doctor, "MEGABYTES", 1)
    assert "writes " in doctor.measure_folder(str(tmp_path)) and not list(tmp_path.iterdir())
