"""Finds what a node has: its GPUs, its network interfaces, and the environment that Python runs in."""

import contextlib
import ctypes
import fcntl
import hashlib
import importlib.util
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from mamba_fsdp.errors import UserError, is_checkout
from mamba_fsdp.launch.host import say
from mamba_fsdp.launch.watcher import WATCHED
from mamba_fsdp.run.names import CACHES

PROJECT = Path(__file__).resolve().parents[2]
SIOCGIFADDR = 0x8915  # Linux's number for "the IPv4 address of this interface"
PR_SET_PDEATHSIG = 1  # Linux's number for "the signal that my parent's death sends me"
LOOPBACK = "127.0.0.1"
LAUNCHER = "LAUNCHER_PID"  # in the environment: the process that has started this one


def assigned_gpus() -> int:
    """Returns how many GPUs this process may use: those that Slurm or the user chose, else all that the driver shows."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = driver_gpus() if chosen is None else chosen.split(",")
    return len([name for name in names if name.strip() not in ("", "-1", "NoDevFiles")])


def driver_gpus() -> list[str]:
    """Returns the names of the GPUs that the NVIDIA driver shows, such as `NVIDIA H100 80GB HBM3`; [] without a driver."""
    if not shutil.which("nvidia-smi"):
        return []
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    listed = subprocess.run(command, capture_output=True, text=True)
    return listed.stdout.split("\n")[:-1] if listed.returncode == 0 else []


def efa_plugin() -> str | None:
    """Returns the library by which NCCL uses EFA (aws-ofi-nccl); None if NCCL would load none.

    NCCL opens libnccl-net.so, or libnccl-net-NAME.so with NCCL_NET_PLUGIN=NAME, which may also be a file. 1.train.sbatch
    sets the variable on a node of a job."""
    plugin = os.environ.get("NCCL_NET_PLUGIN", "")
    names = ["libnccl-net.so"]
    if plugin:
        names = [plugin, f"libnccl-net-{plugin}.so"]
    for name in names:
        with contextlib.suppress(OSError):
            ctypes.CDLL(name)
            return name
    return None


def interface_towards(hosts: Iterable[str]) -> str:
    """Returns the network interface that leads to the first host for which there is one; "" if there is none, or for
    IPv6. The loopback interface leads to LOOPBACK alone: by Debian's /etc/hosts it would be the node's own name's."""
    for host in hosts:
        with (
            contextlib.suppress(OSError),
            socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe,
        ):
            probe.connect((host, 9))  # sends nothing, but looks the route up
            here = probe.getsockname()[0]
            if host == LOOPBACK or not here.startswith("127."):
                for _, name in socket.if_nameindex():
                    with contextlib.suppress(OSError):  # one without an IPv4 address
                        answer = fcntl.ioctl(probe, SIOCGIFADDR, struct.pack("256s", name.encode()))
                        if socket.inet_ntoa(answer[20:24]) == here:
                            return name
    return ""


def check_loopback() -> None:
    """Raises UserError if processes of this machine can't meet on its loopback interface."""
    try:
        with socket.create_server((LOOPBACK, 0)) as server:
            socket.create_connection(server.getsockname(), timeout=10).close()
    except OSError as error:
        raise UserError(
            f"the ranks can't meet on this machine's loopback interface, {LOOPBACK} ({error.strerror}); "
            "switch it on: ip link set lo up"
        ) from None


def node_name() -> str:
    """Returns this node's name: Slurm's, or else the machine's own."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def is_first_node() -> bool:
    """Returns whether this node speaks for all, or is the only one."""
    number = os.environ.get("SLURM_NODEID") or os.environ.get("PET_NODE_RANK")
    return (number or "0") == "0"


def check_version(environment: str | Path = sys.prefix) -> None:
    """Raises UserError unless `environment` (.venv, or the image's own) was made from this checkout's requirements.

    Its stamp, the file .complete, has two lines: the stack and the SHA-256 of requirements/STACK.txt.
    """
    if not is_checkout():  # an installed package: pip has seen to what it needs
        return
    stamp = Path(environment, ".complete")
    stamps = [
        f"{path.stem}\n{hashlib.sha256(path.read_bytes()).hexdigest()}\n"
        for path in PROJECT.glob("requirements/*.txt")
    ]
    if not stamp.is_file() or stamp.read_text() not in stamps:
        raise UserError(
            f"the environment {environment} is incomplete or was made from other requirements than this "
            "checkout's; run ./0.create_env.sh, or with an image: build and import it again"
        )


def end_with_launcher(number: signal.Signals) -> None:
    """Has Linux send this process the signal when its parent dies, even by kill -9.

    A rank that survived would hold the run folder and its GPU for hours. This does nothing if the
    parent is not a launcher but a shell, or Slurm, which ends the processes of a step itself.
    """
    launcher = os.environ.get(LAUNCHER)
    is_rank = "TORCHELASTIC_RUN_ID" in os.environ
    if sys.platform == "linux" and (launcher or is_rank):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)
        if launcher and str(os.getppid()) != launcher:  # the launcher is dead already
            os.kill(os.getpid(), number)


def begin_rank() -> None:
    """Unblocks, in this process, a rank, the signals that its launcher blocks, and ends it when the launcher ends."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, WATCHED)
    end_with_launcher(signal.SIGKILL)


def say_loading() -> None:
    """Says what takes the next seconds, unless this process has PyTorch already."""
    if "torch" not in sys.modules:
        say("loading    PyTorch")


def processes_per_node() -> int:
    """Returns how many ranks a node has: as PROCESSES_PER_NODE or torchrun's variable says, else one a GPU, or one on a
    CPU."""
    chosen = os.environ.get("PROCESSES_PER_NODE") or os.environ.get("PET_NPROC_PER_NODE", "auto")
    if chosen.isdecimal():
        return int(chosen)
    return assigned_gpus() or 1


def set_environment(run_folder: Path, scratch: Path, first_node: str) -> None:
    """Sets the environment variables of the ranks; the user's own values stay.

    scratch: a folder on the node's own disk. first_node: a name.
    """
    caches = run_folder.parent / CACHES
    processes = processes_per_node()
    wanted = {
        # Compiled kernels outlive the job. Rank 0 alone writes Triton's, see patches/.
        "TRITON_CACHE_DIR": str(caches / "triton"),
        "TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor"),
        "TRITON_CACHE_AUTOTUNING": "1",
        "TRITON_DUMP_DIR": str(scratch / "triton-dump"),
    }
    if not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & os.environ.keys():
        # Otherwise fragmentation takes gigabytes of a GPU. Torch 2.2 reads the old name, newer versions both.
        wanted["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
        wanted["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
    if processes > 1:  # torchrun would give each rank one thread
        threads = len(os.sched_getaffinity(0)) // processes
        wanted["OMP_NUM_THREADS"] = str(max(1, threads))
    if _has_rank0_cache():  # Triton 3.4 and newer need to be told
        wanted["TRITON_CACHE_MANAGER"] = "triton.runtime.rank0_cache:Rank0CacheManager"
    # gloo by itself takes the interface of the node's own name, which is 127.0.1.1 on Debian.
    interface = interface_towards([first_node, os.environ.get("LAST_NODE", "")])
    if interface:
        wanted["GLOO_SOCKET_IFNAME"] = interface
    for name, value in wanted.items():
        os.environ.setdefault(name, value)
    os.environ["TMPDIR"] = str(scratch)  # removed with what killed ranks leave there
    os.environ[LAUNCHER] = str(os.getpid())


def _has_rank0_cache() -> bool:
    triton = importlib.util.find_spec("triton")
    if not triton or not triton.origin:
        return False
    return Path(triton.origin).with_name("runtime").joinpath("rank0_cache.py").is_file()
