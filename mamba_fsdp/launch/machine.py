"""Finds the GPUs and network interfaces of a node, and sets up the environment of its ranks."""

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

from mamba_fsdp.errors import PROJECT, UserError, is_checkout
from mamba_fsdp.launch.host import print_line
from mamba_fsdp.launch.watcher import HANDLED_SIGNALS
from mamba_fsdp.run.names import CACHES

SIOCGIFADDR = 0x8915  # Linux's number for "the IPv4 address of this interface"
PR_SET_PDEATHSIG = 1  # Linux's number for "the signal that my parent's death sends me"
LOOPBACK = "127.0.0.1"
LAUNCHER = "LAUNCHER_PID"  # environment variable: the process id of the launcher


def count_assigned_gpus() -> int:
    """Returns the number of GPUs in CUDA_VISIBLE_DEVICES, or of all GPUs of the driver if that
    variable is not set.
    """
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = list_driver_gpus() if chosen is None else chosen.split(",")
    return len([name for name in names if name.strip() not in ("", "-1", "NoDevFiles")])


def list_driver_gpus() -> list[str]:
    """Returns the names of the GPUs that the NVIDIA driver lists, such as `NVIDIA H100 80GB HBM3`;
    [] without a driver.
    """
    if not shutil.which("nvidia-smi"):
        return []
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    listed = subprocess.run(command, capture_output=True, text=True)
    return listed.stdout.split("\n")[:-1] if listed.returncode == 0 else []


def find_efa_library() -> str | None:
    """Returns the name of NCCL's plugin library for EFA (aws-ofi-nccl); None if NCCL would find
    none.

    NCCL opens libnccl-net.so, or libnccl-net-NAME.so if NCCL_NET_PLUGIN=NAME, where NAME can also
    be a file. 1.train.sbatch sets this variable on the nodes of a job.
    """
    plugin = os.environ.get("NCCL_NET_PLUGIN", "")
    names = ["libnccl-net.so"]
    if plugin:
        names = [plugin, f"libnccl-net-{plugin}.so"]
    for name in names:
        with contextlib.suppress(OSError):
            ctypes.CDLL(name)
            return name
    return None


def find_interface_to(hosts: Iterable[str]) -> str:
    """Returns the network interface of the IPv4 route to the first host that has one; "" if no host
    has one.

    The loopback interface is returned only for LOOPBACK itself: in Debian's /etc/hosts, the name of
    a node resolves to an address of its loopback interface.
    """
    for host in hosts:
        with (
            contextlib.suppress(OSError),
            socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe,
        ):
            probe.connect((host, 9))  # connecting a UDP socket only looks up the route
            here = probe.getsockname()[0]
            if host == LOOPBACK or not here.startswith("127."):
                for _, name in socket.if_nameindex():
                    # Interfaces without an IPv4 address raise OSError.
                    with contextlib.suppress(OSError):
                        answer = fcntl.ioctl(probe, SIOCGIFADDR, struct.pack("256s", name.encode()))
                        if socket.inet_ntoa(answer[20:24]) == here:
                            return name
    return ""


def check_loopback() -> None:
    """Raises UserError if processes of this machine can't connect through its loopback interface."""
    try:
        with socket.create_server((LOOPBACK, 0)) as server:
            socket.create_connection(server.getsockname(), timeout=10).close()
    except OSError as error:
        raise UserError(
            f"the ranks can't connect through the loopback interface of this machine, {LOOPBACK} ({error.strerror}); "
            "enable it: ip link set lo up; if it has no such address: ip addr add 127.0.0.1/8 dev lo"
        ) from None


def node_name() -> str:
    """Returns the name of this node in Slurm, or else its host name."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def is_first_node() -> bool:
    """Returns whether this is the first node of the job. The first node prints the messages for all
    nodes.
    """
    number = os.environ.get("SLURM_NODEID") or os.environ.get("PET_NODE_RANK")
    return (number or "0") == "0"


def check_version(environment: str | Path = sys.prefix) -> None:
    """Raises UserError if the installed packages do not match this checkout's requirements.

    environment: the folder of the Python environment, .venv or the environment in an image. Its
    file .complete has two lines: the name of the stack and the SHA-256 of requirements/STACK.txt.
    """
    if not is_checkout():  # pip has checked the dependencies of an installed package
        return
    stamp = Path(environment, ".complete")
    stamps = [
        f"{path.stem}\n{hashlib.sha256(path.read_bytes()).hexdigest()}\n"
        for path in PROJECT.glob("requirements/*.txt")
    ]
    if not stamp.is_file() or stamp.read_text() not in stamps:
        raise UserError(
            f"the environment {environment} is incomplete or does not match the requirements of this checkout; "
            "run ./0.create_env.sh, or build and import the image again"
        )


def end_with_launcher(number: signal.Signals) -> None:
    """Makes Linux send this process the signal when its parent process dies, even from SIGKILL.

    A rank that survived its launcher would occupy the run folder and its GPU for hours. This
    function does nothing if the parent is a shell. It also does nothing if the parent is Slurm,
    because Slurm itself ends the processes of a step.
    """
    launcher = os.environ.get(LAUNCHER)
    is_rank = "TORCHELASTIC_RUN_ID" in os.environ
    if sys.platform == "linux" and (launcher or is_rank):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)
        if launcher and str(os.getppid()) != launcher:  # the launcher has died already
            os.kill(os.getpid(), number)


def set_up_rank_signals() -> None:
    """Prepares the signals of a rank: unblocks those that its launcher blocks, and lets the rank
    end with the launcher.
    """
    signal.pthread_sigmask(signal.SIG_UNBLOCK, HANDLED_SIGNALS)
    end_with_launcher(signal.SIGKILL)


def print_loading() -> None:
    """Prints that PyTorch is being loaded, unless this process has loaded it already. Loading takes
    seconds.
    """
    if "torch" not in sys.modules:
        print_line("loading    PyTorch")


def processes_per_node() -> int:
    """Returns the number of ranks of a node: PROCESSES_PER_NODE, torchrun's PET_NPROC_PER_NODE, or
    else one for each GPU, or one on a CPU.
    """
    chosen = os.environ.get("PROCESSES_PER_NODE") or os.environ.get("PET_NPROC_PER_NODE", "auto")
    if chosen.isdecimal():
        return int(chosen)
    return count_assigned_gpus() or 1


def set_environment(run_folder: Path, scratch: Path, first_node: str) -> None:
    """Sets the environment variables of the ranks. Variables that the user has set are not changed,
    except TMPDIR.

    scratch: a folder on the local disk of the node. first_node: the host name of the first node.
    """
    caches = run_folder.parent / CACHES
    processes = processes_per_node()
    wanted = {
        # Compiled kernels are kept for later jobs. Only rank 0 writes the kernels of Triton, see patches/.
        "TRITON_CACHE_DIR": str(caches / "triton"),
        "TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor"),
        "TRITON_CACHE_AUTOTUNING": "1",
        "TRITON_DUMP_DIR": str(scratch / "triton-dump"),
    }
    if not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & os.environ.keys():
        # Otherwise fragmentation wastes gigabytes of GPU memory. Torch 2.2 reads only the old name, newer
        # versions read both.
        wanted["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
        wanted["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
    if processes > 1:  # otherwise torchrun limits each rank to one thread
        threads = len(os.sched_getaffinity(0)) // processes
        wanted["OMP_NUM_THREADS"] = str(max(1, threads))
    if _has_rank0_cache():  # Triton 3.4 and newer do not use it by default
        wanted["TRITON_CACHE_MANAGER"] = "triton.runtime.rank0_cache:Rank0CacheManager"
    # By default, gloo uses the interface of the host name's address. On Debian this address is 127.0.1.1, and other
    # nodes can't reach it.
    interface = find_interface_to([first_node, os.environ.get("LAST_NODE", "")])
    if interface:
        wanted["GLOO_SOCKET_IFNAME"] = interface
    for name, value in wanted.items():
        os.environ.setdefault(name, value)
    os.environ["TMPDIR"] = str(scratch)  # removed at the end, with the files of killed ranks
    os.environ[LAUNCHER] = str(os.getpid())


def _has_rank0_cache() -> bool:
    triton = importlib.util.find_spec("triton")
    if not triton or not triton.origin:
        return False
    return Path(triton.origin).with_name("runtime").joinpath("rank0_cache.py").is_file()
