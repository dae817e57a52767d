"""The launcher: what NCCL and libfabric are told, by the devices that a node has."""

import os
import subprocess

import pytest

from tests.support.processes import run_program, write_program
from tests.support.projects import edit

NETWORK = ("FI_", "NCCL_", "RDMAV_", "EFA_COUNT")


GPU = "GPU 0: NVIDIA A10G (UUID: GPU-1)\n"
IN_A_JOB = {"SLURM_JOB_ID": "1"}
SOCKETS = {"NCCL_SOCKET_IFNAME": "^docker,lo,veth"}
EFA = {"FI_PROVIDER": "efa", "FI_EFA_USE_HUGE_PAGE": "0", "FI_EFA_SET_CUDA_SYNC_MEMOPS": "0"}
OWN = {"NCCL_SOCKET_IFNAME": "eth1", "FI_EFA_USE_HUGE_PAGE": "1"}
NODES = {  # the drivers of its network devices, what nvidia-smi says, what is set: what a command finds
    "EFA": (["efa"] * 4, "", IN_A_JOB, {"EFA_COUNT": "4"} | SOCKETS | EFA),
    "InfiniBand and NVLink": (["mlx5_core"], GPU + "\t Link 0: 26.562 GB/s", IN_A_JOB, SOCKETS),
    "no NVLink": (["mlx5_core"], GPU, IN_A_JOB, {"NCCL_SHM_USE_CUDA_MEMCPY": "1"} | SOCKETS),
    "a laptop, which may have its loopback interface alone": ([], "", {}, {}),
    "what the user has set": (["efa"], "", IN_A_JOB | OWN, {"EFA_COUNT": "1"} | EFA | OWN),
}


@pytest.mark.parametrize("node", NODES)
def test_a_node_gets_the_settings_of_its_devices_and_no_obsolete_ones(project, tmp_path, node):
    """Copy engines for NCCL's shared memory only if GPUs have no link to each other."""
    drivers, said, given, expected = NODES[node]
    for number, driver in enumerate(drivers):
        (tmp_path / "drivers" / driver).mkdir(parents=True, exist_ok=True)
        (tmp_path / f"class/{number}/device").mkdir(parents=True)
        (tmp_path / f"class/{number}/device/driver").symlink_to(tmp_path / "drivers" / driver)
    smi = f"echo '{said}'" if said else "exit 9"
    write_program(tmp_path / "bin/nvidia-smi", f"#!/bin/sh\n{smi}\n")
    script = write_program(tmp_path / "1.train.sbatch", (project / "1.train.sbatch").read_text())
    edit(script, "EFA_FOLDER=/sys/class/infiniband ", f"EFA_FOLDER={tmp_path}/class ")
    path = f"{tmp_path}/bin:{os.environ['PATH']}"
    on_node = {"PATH": path, "MAMBA_TRAIN_NODE": "1", **given}
    said = subprocess.check_output([script, "env"], env=on_node, text=True)
    pairs = dict(line.split("=", 1) for line in said.splitlines())
    found = {name: value for name, value in pairs.items() if name.startswith(NETWORK)}
    assert found == {"EFA_COUNT": "0"} | expected


def test_a_command_that_a_node_lacks_is_named(project):
    done = run_program(project / "1.train.sbatch", "no-such-command", MAMBA_TRAIN_NODE="1")
    assert done.returncode == 2 and done.stderr.startswith("error: there is no no-such-command on ")
