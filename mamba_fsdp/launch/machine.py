"""What a node has: its GPUs, its network interfaces, and the environment that Python runs in."""

import contextlib
import fcntl
import hashlib
import os
import shutil
import socket
import struct
import subprocess
import sys
from collections.abc import Iterable
from ctypes.util import find_library
from pathlib import Path

from mamba_fsdp.errors import UserError

PROJECT = Path(__file__).resolve().parents[2]
SIOCGIFADDR = 0x8915  # Linux's number for "the IPv4 address of this interface"


def assigned_gpus() -> int:
    """How many GPUs this process may use: those that Slurm or the user chose, else all that the driver shows."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = driver_gpus() if chosen is None else chosen.split(",")
    return len([name for name in names if name.strip() not in ("", "-1", "NoDevFiles")])


def driver_gpus() -> list[str]:
    """Names of the GPUs that the NVIDIA driver shows, such as `NVIDIA H100 80GB HBM3`; [] without a driver."""
    if not shutil.which("nvidia-smi"):
        return []
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    listed = subprocess.run(command, capture_output=True, text=True, timeout=120)
    return listed.stdout.split("\n")[:-1] if listed.returncode == 0 else []


def efa_plugin() -> str | None:
    """The library by which NCCL uses EFA (aws-ofi-nccl), None where there is none."""
    return find_library("nccl-net") or find_library("nccl-net-ofi")


def interface_towards(hosts: Iterable[str]) -> str:
    """The network interface on the way to the first of `hosts` (names) that is another machine; "" for none or IPv6."""
    for host in filter(None, hosts):
        with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, 9))  # sends nothing, but looks the route up
            here, there = probe.getsockname()[0], probe.getpeername()[0]
            if here != there and not there.startswith("127."):
                return _interface_of(here)
    return ""


def _interface_of(address):
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # one without an IPv4 address
                answer = fcntl.ioctl(any_socket, SIOCGIFADDR, struct.pack("256s", name.encode()))
                if socket.inet_ntoa(answer[20:24]) == address:
                    return name
    return ""


def node_name() -> str:
    """What Slurm, or else the machine itself, calls this node."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def check_version(environment: str | Path = sys.prefix) -> None:
    """Raises UserError unless `environment` (.venv, or the image's own) was made from this checkout's requirements.

    Its stamp, the file .complete, has two lines: the stack and the SHA-256 of requirements/STACK.txt.
    """
    remedy = "run ./0.create_env.sh, or with an image: build and import it again"
    stamp = Path(environment) / ".complete"
    if not stamp.is_file():
        raise UserError(f"the environment {environment} has no {stamp.name}, so it is half-made or not ours; {remedy}")
    stack, made_from = (stamp.read_text().split() + ["", ""])[:2]
    requirements = PROJECT / "requirements" / f"{stack}.txt"
    if not requirements.is_file() or hashlib.sha256(requirements.read_bytes()).hexdigest() != made_from:
        raise UserError(f"the environment {environment} was made from another requirements/{stack}.txt; {remedy}")
