"""Tests the variables for NCCL and libfabric that 1.train.sbatch sets on a node."""

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
LISTED = "\tlibnccl-net-ofi.so (libc6,x86-64) => /opt/amazon/ofi-nccl/lib/libnccl-net-ofi.so\n"
# {case: (libraries that ldconfig lists, variables that the user has set, the expected NCCL_NET_PLUGIN)}
PLUGINS = {
    "by its own name": ("\tlibnccl-net.so (libc6) => a\n" + LISTED, {}, None),
    "by another name alone": (LISTED, {}, "ofi"),
    "a version, which NCCL does not ask for": (
        "\tlibnccl-net.so.0 (libc6) => a\n" + LISTED,
        {},
        "ofi",
    ),
    "none": ("", {}, None),
    "what the user has set": (LISTED, {"NCCL_NET_PLUGIN": "mine"}, "mine"),
}
# {case: (drivers of the network devices, output of nvidia-smi, variables that are set, the expected variables)}
NODES = {
    "EFA": (["efa"] * 4, "", IN_A_JOB, {"EFA_COUNT": "4"} | SOCKETS | EFA),
    "InfiniBand and NVLink": (["mlx5_core"], GPU + "\t Link 0: 26.562 GB/s", IN_A_JOB, SOCKETS),
    "no NVLink": (["mlx5_core"], GPU, IN_A_JOB, {"NCCL_SHM_USE_CUDA_MEMCPY": "1"} | SOCKETS),
    "a laptop, which may have its loopback interface alone": ([], "", {}, {}),
    "what the user has set": (["efa"], "", IN_A_JOB | OWN, {"EFA_COUNT": "1"} | EFA | OWN),
}


def node_command(project, folder, drivers):
    """Returns a function command(**environment) that returns the environment of a command on a node.

    The node has one network device for each driver, and the programs in folder/bin. ldconfig of the node lists no
    libraries.
    """
    for number, driver in enumerate(drivers):
        (folder / "drivers" / driver).mkdir(parents=True, exist_ok=True)
        (folder / f"class/{number}/device").mkdir(parents=True)
        (folder / f"class/{number}/device/driver").symlink_to(folder / "drivers" / driver)
    script = write_program(folder / "1.train.sbatch", (project / "1.train.sbatch").read_text())
    edit(script, "EFA_FOLDER=/sys/class/infiniband ", f"EFA_FOLDER={folder}/class ")
    write_program(folder / "bin/ldconfig", "#!/bin/sh\n")

    def command(**given):
        path = f"{folder}/bin:{os.environ['PATH']}"
        on_node = {"PATH": path, "MAMBA_TRAIN_NODE": "1", **given}
        output = subprocess.check_output([script, "env"], env=on_node, text=True)
        return dict(line.split("=", 1) for line in output.splitlines())

    return command


@pytest.mark.parametrize("node", NODES)
def test_a_node_gets_the_settings_of_its_devices_and_no_obsolete_ones(project, tmp_path, node):
    """The variables for NCCL and libfabric are exactly the ones that the devices of the node need. NCCL uses copy
    engines for its shared memory only if the GPUs have no NVLink."""
    drivers, smi_output, given, expected = NODES[node]
    command = node_command(project, tmp_path, drivers)
    smi = f"echo '{smi_output}'" if smi_output else "exit 9"
    write_program(tmp_path / "bin/nvidia-smi", f"#!/bin/sh\n{smi}\n")
    pairs = command(**given)
    found = {name: value for name, value in pairs.items() if name.startswith(NETWORK)}
    assert found == {"EFA_COUNT": "0"} | expected


@pytest.mark.parametrize("plugin", PLUGINS)
def test_nccl_is_told_of_a_plugin_that_it_does_not_look_for(project, tmp_path, plugin):
    """NCCL_NET_PLUGIN is set if NCCL would not find the plugin by its default name. NCCL would then silently use
    TCP."""
    listed, given, expected = PLUGINS[plugin]
    command = node_command(project, tmp_path, ["efa"])
    write_program(tmp_path / "bin/ldconfig", f"#!/bin/sh\nprintf '{listed}'\n")
    assert command(**given).get("NCCL_NET_PLUGIN") == expected
    (tmp_path / "libnccl-net.so").touch()
    found = command(LD_LIBRARY_PATH=f"/nowhere:{tmp_path}", **given)
    assert found.get("NCCL_NET_PLUGIN") == given.get("NCCL_NET_PLUGIN")


def test_a_command_that_a_node_lacks_is_named(project):
    done = run_program(project / "1.train.sbatch", "no-such-command", MAMBA_TRAIN_NODE="1")
    assert done.returncode == 2 and done.stderr.startswith(
        "error: found no command no-such-command on "
    )
