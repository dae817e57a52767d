"""The launcher: what NCCL and libfabric are told, by the devices that a node has."""

import os
import subprocess

import pytest

from tests.support.processes import run_program, write_program
from tests.support.projects import edit

NETWORK = ("FI_", "NCCL_", "RDMAV_", "EFA_COUNT")


def network_environment(project, devices, tmp_path, **given):
    """The variables that a command finds on a node with `devices`: name -> driver."""
    for name, driver in devices.items():
        (tmp_path / "drivers" / driver).mkdir(parents=True, exist_ok=True)
        (tmp_path / "class" / name / "device").mkdir(parents=True)
        (tmp_path / "class" / name / "device/driver").symlink_to(tmp_path / "drivers" / driver)
    script = write_program(tmp_path / "1.train.sbatch", (project / "1.train.sbatch").read_text())
    edit(script, "EFA_FOLDER=/sys/class/infiniband ", f"EFA_FOLDER={tmp_path}/class ")
    clean = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith((*NETWORK, "SLURM"))
    }
    on_node = {**clean, **given, "MAMBA_TRAIN_NODE": "1"}
    done = subprocess.run([script, "env"], env=on_node, capture_output=True, text=True, check=True)
    pairs = dict(line.split("=", 1) for line in done.stdout.splitlines() if "=" in line)
    return {name: value for name, value in pairs.items() if name.startswith(NETWORK)}


@pytest.mark.parametrize("count", [4, 32, 16])
def test_efa_nodes_get_efa_settings_and_no_obsolete_ones(project, tmp_path, count):
    found = network_environment(
        project, {f"rdmap{i}s0": "efa" for i in range(count)}, tmp_path, SLURM_JOB_ID="1"
    )
    assert found == {
        "EFA_COUNT": str(count),
        "FI_PROVIDER": "efa",
        "FI_EFA_USE_HUGE_PAGE": "0",
        "FI_EFA_SET_CUDA_SYNC_MEMOPS": "0",
        "NCCL_SOCKET_IFNAME": "^docker,lo,veth",
    }


GPU = "GPU 0: NVIDIA A10G (UUID: GPU-1)\n"


@pytest.mark.parametrize(
    "said, expected",
    [
        (None, {}),
        (GPU + "\t Link 0: 26.562 GB/s", {}),
        (GPU, {"NCCL_SHM_USE_CUDA_MEMCPY": "1"}),
    ],
    ids=["no GPU", "InfiniBand and NVLink", "no NVLink"],
)
def test_nodes_without_efa_get_no_libfabric_setting(project, tmp_path, said, expected):
    """And copy engines for NCCL's shared memory only where GPUs have no link to each other."""
    body = "exit 9" if said is None else f"echo '{said}'"
    write_program(tmp_path / "nvidia-smi", f"#!/bin/sh\n{body}")
    path = f"{tmp_path}:{os.environ['PATH']}"
    devices = {"mlx5_0": "mlx5_core"} if said else {}
    found = network_environment(project, devices, tmp_path, SLURM_JOB_ID="1", PATH=path)
    assert found == {"EFA_COUNT": "0", "NCCL_SOCKET_IFNAME": "^docker,lo,veth"} | expected


def test_one_machine_alone_keeps_its_loopback_interface(project, tmp_path):
    """A laptop without a network has no other."""
    assert "NCCL_SOCKET_IFNAME" not in network_environment(project, {}, tmp_path)


def test_what_the_user_has_set_stays(project, tmp_path):
    found = network_environment(
        project,
        {"efa_0": "efa"},
        tmp_path,
        SLURM_JOB_ID="1",
        NCCL_SOCKET_IFNAME="eth1",
        FI_EFA_USE_HUGE_PAGE="1",
    )
    assert found["NCCL_SOCKET_IFNAME"] == "eth1" and found["FI_EFA_USE_HUGE_PAGE"] == "1"


def test_a_command_that_a_node_lacks_is_named(project):
    done = run_program(project / "1.train.sbatch", "no-such-command", MAMBA_TRAIN_NODE="1")
    assert done.returncode == 2 and done.stderr.startswith("error: there is no no-such-command on ")
