"""The launcher: what NCCL and libfabric are told, by the devices that a node has; and when a node counts as lost."""

import os
import subprocess

import pytest

NETWORK = ("FI_", "NCCL_", "RDMAV_", "EFA_COUNT")


def network_environment(project, devices, tmp_path, **given):
    """The variables that set_network exports on a node with `devices`: name -> driver."""
    for name, driver in devices.items():
        (tmp_path / "drivers" / driver).mkdir(parents=True, exist_ok=True)
        (tmp_path / "class" / name / "device").mkdir(parents=True)
        (tmp_path / "class" / name / "device/driver").symlink_to(tmp_path / "drivers" / driver)
    script = f'source "{project}/mamba_fsdp/launch/environment.sh"; EFA_FOLDER="{tmp_path}/class"; set_network; env'
    clean = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith((*NETWORK, "SLURM"))
    }
    done = subprocess.run(
        ["bash", "-c", script], env={**clean, **given}, capture_output=True, text=True, check=True
    )
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


@pytest.mark.parametrize("devices", [{}, {"mlx5_0": "mlx5_core"}])
def test_nodes_without_efa_get_no_libfabric_setting(project, tmp_path, devices):
    found = network_environment(project, devices, tmp_path, SLURM_JOB_ID="1")
    assert found == {
        "EFA_COUNT": "0",
        "NCCL_SHM_USE_CUDA_MEMCPY": "1",
        "NCCL_SOCKET_IFNAME": "^docker,lo,veth",
    }


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


WATCH = """
sleep() { ((++looks < 4)); }
srun() { while [ "$1" != sh ]; do shift; done; SLURMD_NODENAME=n2 bash "${@:2}"; exit; }
squeue() { printf %s "$LISTED"; return "$FAILS"; }
scontrol() { if [ "$1" = requeue ]; then echo "$*"; else [ -n "$HOSTS" ] && printf '%s\\n' $HOSTS; fi; }
export -f sleep squeue scontrol
source "$0"; nodes=(n1 n2); watch_first_node
"""


@pytest.mark.parametrize(
    "listed, hosts, fails, asks",
    [
        ("n2", "n2", 0, True),
        ("n[1-2]", "n1 n2", 0, False),
        ("", "", 0, False),
        ("", "", 1, False),
        ("n2", "", 0, False),
        ("n[3-4]", "n3 n4", 0, False),
    ],
    ids=["lost", "there", "no job", "no Slurm", "no names", "later"],
)
def test_a_job_is_queued_again_only_where_slurm_says_that_its_first_node_is_lost(
    project, listed, hosts, fails, asks
):
    """By a node that the job still has, as it has not where it began anew elsewhere: this start is over then."""
    given = {"job": "7", "LISTED": listed, "HOSTS": hosts, "FAILS": str(fails)}
    done = subprocess.run(
        ["bash", "-c", WATCH, f"{project}/mamba_fsdp/launch/spares.sh"],
        env={**os.environ, **given},
        capture_output=True,
        text=True,
    )
    assert (done.stdout, done.stderr) == ("requeue 7\n" * 3 * asks, "")
