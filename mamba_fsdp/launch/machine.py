"""What a node has: its GPUs, its network interfaces, and the environment that Python runs in."""

import contextlib
import fcntl
import hashlib
import importlib.util
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
        with (
            contextlib.suppress(OSError),
            socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe,
        ):
            probe.connect((host, 9))  # sends nothing, but looks the route up
            here, there = probe.getsockname()[0], probe.getpeername()[0]
            if here != there and not there.startswith("127."):
                for _, name in socket.if_nameindex():
                    with contextlib.suppress(OSError):  # one without an IPv4 address
                        answer = fcntl.ioctl(probe, SIOCGIFADDR, struct.pack("256s", name.encode()))
                        if socket.inet_ntoa(answer[20:24]) == here:
                            return name
    return ""


def hold_port(port: int = 0) -> socket.socket:
    """A socket that keeps the port (0: a free one) from whoever asks for any, but not from TCPStore, which names it."""
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    with contextlib.suppress(OSError):  # then rank 0 says what is wrong
        held.bind(("", port))
    return held


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
        raise UserError(
            f"the environment {environment} has no {stamp.name}, so it is half-made or not ours; {remedy}"
        )
    stack, made_from = (stamp.read_text().split() + ["", ""])[:2]
    requirements = PROJECT / "requirements" / f"{stack}.txt"
    if (
        not requirements.is_file()
        or hashlib.sha256(requirements.read_bytes()).hexdigest() != made_from
    ):
        raise UserError(
            f"the environment {environment} was made from another requirements/{stack}.txt; {remedy}"
        )


def set_environment(words: list[str], scratch: str) -> None:
    """Set what the ranks find in their environment. words: torchrun's. scratch: a folder on the node's own disk."""
    os.environ["PROCESSES_PER_NODE"] = os.environ.get("PROCESSES_PER_NODE") or str(
        assigned_gpus() or 1
    )
    processes, alone = int(os.environ["PROCESSES_PER_NODE"]), "--standalone" in words
    if processes > 1:  # left alone, torchrun gives each rank one thread
        os.environ.setdefault(
            "OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // processes))
        )
    # Threads that spin while they wait make training on a CPU five times slower as soon as anything else runs there.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # Ranks that start again must not find the addresses of those before them in a store that torchrun keeps.
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    # One rank writes Triton's cache where patches/apply.py was here; Triton 3.4 and newer need to be told.
    triton = importlib.util.find_spec("triton")
    if (
        triton
        and triton.origin
        and Path(triton.origin).with_name("runtime").joinpath("rank0_cache.py").is_file()
    ):
        os.environ.setdefault(
            "TRITON_CACHE_MANAGER", "triton.runtime.rank0_cache:Rank0CacheManager"
        )
    # Caches are on the node's own disk and new for each start, for shared by nodes or versions they break: what is in
    # the first folder train/kernel_cache.py keeps. The scope is for the cache writer: one rank of each node fills them.
    caches = {
        "KERNELS_ON_NODE": f"{scratch}/kernels",
        "TRITON_CACHE_DIR": f"{scratch}/kernels/triton",
        "TRITON_DUMP_DIR": f"{scratch}/triton-dump",
        "TORCHINDUCTOR_CACHE_DIR": f"{scratch}/kernels/inductor",
        "TRITON_RANK0_SCOPE": "node",
        "TRITON_CACHE_AUTOTUNING": "1",
    }
    os.environ |= {name: os.environ.get(name, caches[name]) for name in caches} if alone else caches
    first_node = "".join(
        word[16:].rpartition(":")[0] for word in words if word.startswith("--rdzv-endpoint=")
    )
    # gloo by itself takes the interface of the node's own name, which is 127.0.1.1 on Debian.
    if not alone and (
        interface := interface_towards([first_node, os.environ.get("LAST_NODE", "")])
    ):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
