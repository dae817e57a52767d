"""The doctor says that an environment is whole only when it is, on one machine and on several nodes."""

import contextlib
import io
import os
import subprocess
import sys
from unittest.mock import patch

import pytest

from mamba_fsdp.errors import UserError
from mamba_fsdp.launch import machine
from mamba_fsdp.ops.backends import OPERATORS, WHOLE
from mamba_fsdp.parallel.world import World
from mamba_fsdp.verbs import doctor
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.torch22


def consult(project, first_on_path="", *words):
    environment = {**os.environ, "PYTHONPATH": str(first_on_path), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "-m", "mamba_fsdp", "doctor", *words],
        cwd=project,
        env=environment,
        capture_output=True,
        text=True,
    )


def test_what_is_installed_is_looked_at(project):
    """But for what nothing here imports by itself, or only if asked to."""
    wanted = {
        line.partition("==")[0]
        for line in (project / "requirements/cpu.txt").read_text().splitlines()
        if "==" in line and line[0] != "#"
    }
    assert wanted - {*doctor.PACKAGES} <= {
        "tqdm",
        "sentencepiece",
        "protobuf",
        "matplotlib",
        "wandb",
        "prometheus-client",
    }


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(doctor, "MEGABYTES", 1)


@pytest.mark.slow
def test_a_broken_environment_is_named_and_the_rest_told(project, tmp_path):
    """A package that can't be imported fails, as does the module that needs it; all else is told. A step of training
    lowers the loss, each operator has a backend, and a folder that is not there is not made."""
    (tmp_path / "datasets").mkdir()
    (tmp_path / "datasets" / "__init__.py").write_text("raise ImportError('broken on purpose')\n")
    done = consult(project, tmp_path, str(tmp_path / "nowhere"))
    assert done.returncode == 1 and not done.stderr
    lines = {line[5:21].strip(): (line[:5].strip(), line[21:]) for line in done.stdout.splitlines()}
    failed = {name for name, (verdict, _) in lines.items() if verdict == "FAIL"}
    assert failed == {"datasets", "this project", "folder"} or failed == {"datasets", "folder"}
    assert lines["datasets"][1].startswith("ImportError: broken on purpose (")
    assert (
        f"make a folder in {tmp_path}/nowhere" in lines["folder"][1]
        and not (tmp_path / "nowhere").exists()
    )
    assert lines["training cpu"][1].startswith("one step: loss ")
    assert all(
        operator in lines["operators cpu"][1] for operator in OPERATORS if operator not in WHOLE
    )


def as_ranks(world, folder):
    """Each is a node of its own, and has its own version of torch."""
    world.local_rank, world.local_size = 0, 1
    nowhere = f"{folder}/nowhere"
    said = io.StringIO()
    with (
        patch.object(doctor, "MEGABYTES", 1),
        patch.object(machine, "node_name", lambda: f"node{world.rank}"),
        contextlib.redirect_stdout(said),
    ):
        failed = [
            doctor.judge(world, "torch", lambda: f"2.{world.rank}"),
            doctor.judge(world, "GPU", lambda: "the same"),
            doctor.judge(world, "ranks", lambda: doctor.measure_ranks(world), together=True),
            doctor.judge(
                world, "folder", lambda: doctor.measure_folder(world, folder), together=True
            ),
            doctor.judge(
                world, "folder", lambda: doctor.measure_folder(world, nowhere), together=True
            ),
        ]
        with pytest.raises(UserError, match="on a file system that the nodes share"):
            doctor.read_file(doctor.Path(folder, "node1"))
    return failed, said.getvalue().splitlines()


@pytest.mark.slow
def test_nodes_are_compared_and_their_speeds_measured(tmp_path):
    (failed, lines), others = run_ranks(2, as_ranks, str(tmp_path))
    assert failed == [True, False, False, False, True] and others == ([False] * 5, [])
    assert lines[:3] == [
        *(f"FAIL torch           node{rank}: 2.{rank}; nodes differ" for rank in range(2)),
        "ok   GPU             the same",
    ]
    assert lines[3].startswith("ok   ranks           2 on 2 nodes over gloo: all-reduce of 1 MB ")
    assert (
        lines[4].startswith(f"ok   folder          {tmp_path} on ") and "a node writes " in lines[4]
    )
    assert len(lines) == 6 and "nowhere" in lines[5] and not list(tmp_path.iterdir())


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
    port = added.pop("MASTER_PORT")
    assert added == {
        "RANK": "3",
        "WORLD_SIZE": "4",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "gpu-07",
        "GLOO_SOCKET_IFNAME": "eth7",
    }
    assert 20000 <= int(port) < 30000
    monkeypatch.setattr(os, "environ", step | {"SLURM_STEP_NUM_TASKS": "1"})
    doctor.join_step()
    assert "RANK" not in os.environ


def test_efa_devices_need_the_library_that_uses_them(tmp_path, monkeypatch):
    (tmp_path / "rdmap0/device").mkdir(parents=True)
    (tmp_path / "drivers/efa").mkdir(parents=True)
    (tmp_path / "rdmap0/device/driver").symlink_to(tmp_path / "drivers/efa")
    monkeypatch.setattr(doctor, "EFA_FOLDER", tmp_path)
    monkeypatch.setattr(machine, "find_library", lambda name: None)
    assert doctor.attempt(doctor.check_efa)[0] == "FAIL"
    monkeypatch.setattr(machine, "find_library", lambda name: f"lib{name}.so")
    assert doctor.check_efa() == "1 devices, libnccl-net.so"
    monkeypatch.setattr(doctor, "EFA_FOLDER", tmp_path / "none")
    assert doctor.attempt(doctor.check_efa) == ("-", "no devices")


@pytest.mark.parametrize(
    ("driver", "assigned", "verdict"),
    [([], 0, "-"), (["NVIDIA A100"], 1, "FAIL"), (["NVIDIA A100"], 2, "FAIL")],
)
def test_gpus_that_torch_or_slurm_see_differently_fail(driver, assigned, verdict, monkeypatch):
    monkeypatch.setattr(machine, "driver_gpus", lambda: driver)
    monkeypatch.setattr(machine, "assigned_gpus", lambda: assigned)
    assert doctor.attempt(doctor.check_gpus)[0] == verdict


def test_a_rank_alone_measures_its_folder(tmp_path, quick):
    text = doctor.measure_folder(World.alone(), str(tmp_path))
    assert "this machine writes " in text and not list(tmp_path.iterdir())
