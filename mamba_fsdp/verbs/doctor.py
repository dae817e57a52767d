"""python -m mamba_fsdp doctor [FOLDER]

What this machine has and whether it works: packages, this project, devices, the backend that serves each operator, a step
of training, EFA, Triton's cache. A verdict a line: `ok`, `FAIL`, or `-` for what is not here and need not be. FOLDER:
where runs are to lie; its speed is measured too, with some files that are removed again. Exits with 1 where any fails.

On a cluster it tells of every node, and how fast the ranks talk to each other. One task a GPU:

    srun --nodes=2 --ntasks-per-node=8 --gpus-per-node=8 .venv/bin/python -m mamba_fsdp doctor /fsx/runs
"""

import contextlib
import importlib
import importlib.util
import os
import pkgutil
import platform
import re
import shutil
import statistics
import time
import traceback
from collections.abc import Callable
from functools import partial
from importlib import metadata
from pathlib import Path

import torch
import torch.distributed as dist

import mamba_fsdp
from config.model_config import ModelConfig
from mamba_fsdp.errors import UserError, first_line
from mamba_fsdp.launch import machine
from mamba_fsdp.model.init import initial_value
from mamba_fsdp.model.lm import MambaLM
from mamba_fsdp.model.spec import operator_uses, parameters
from mamba_fsdp.ops.backends import resolve_backends
from mamba_fsdp.parallel.compat import HAS_FSDP2
from mamba_fsdp.parallel.world import World, start_world
from mamba_fsdp.planning.devices import device_peak
from mamba_fsdp.report.console import Console
from mamba_fsdp.storage import hidden_beside

PACKAGES = (
    "torch",
    "triton",
    "transformers",
    "tokenizers",
    "datasets",
    "pyarrow",
    "numpy",
    "safetensors",
    "fire",
    "xxhash",
    "PyYAML",
    "zstandard",
    "plotly",
    "tensorboard",
    "einops",
    "causal-conv1d",
    "mamba-ssm",
)
OPTIONAL = {"triton", "einops", "causal-conv1d", "mamba-ssm"}  # they serve GPUs only
EFA_FOLDER = Path("/sys/class/infiniband")  # where Linux lists EFA devices
MEGABYTES, ROUNDS = 256, 5  # that speeds are measured with


class Absent(Exception):
    """Something is not here and need not be."""


def main(folder: str = "") -> int:
    """Returns 1 where anything fails, else 0."""
    join_step()
    world = start_world()
    with contextlib.closing(world):
        checks: dict[str, Callable[[], str]] = {
            "Python": lambda: f"{platform.python_version()}, {platform.platform()}",
            **{name: partial(check_package, name) for name in PACKAGES},
            "this project": check_project,
            "environment": check_environment,
            "GPU": check_gpus,
            "EFA": check_efa,
            **{
                f"{what} {device}": partial(check, device)
                for device in ("cpu", "cuda")[: 1 + torch.cuda.is_available()]
                for what, check in (("operators", check_operators), ("training", check_training))
            },
            "Triton's cache": check_triton_cache,
        }
        failed = [judge(world, name, check) for name, check in checks.items()]
        failed += [
            judge(world, name, check, together=True)
            for name, check in (
                ("ranks", partial(measure_ranks, world)),
                ("folder", partial(measure_folder, world, folder)),
            )
        ]
    return 1 if any(failed) else 0


def join_step() -> None:
    """Sets what torchrun would, where srun has started several tasks."""
    step = os.environ
    if "RANK" in step or int(step.get("SLURM_STEP_NUM_TASKS", 1)) == 1:
        return
    host = "".join(re.findall(r"^([^,[]+)(?:\[(\d+))?", step["SLURM_STEP_NODELIST"])[0])
    step |= {
        "RANK": step["SLURM_PROCID"],
        "WORLD_SIZE": step["SLURM_STEP_NUM_TASKS"],
        "LOCAL_RANK": step["SLURM_LOCALID"],
        "MASTER_ADDR": host,
        "LOCAL_WORLD_SIZE": re.findall(r"\d+", step["SLURM_STEP_TASKS_PER_NODE"])[0],
        "MASTER_PORT": str(
            20000 + (7 * int(step["SLURM_JOB_ID"]) + int(step["SLURM_STEP_ID"])) % 10000
        ),
    }
    if interface := machine.interface_towards([host, step.get("SLURM_LAUNCH_NODE_IPADDR", "")]):
        step.setdefault("GLOO_SOCKET_IFNAME", interface)


def attempt(check: Callable[[], str]) -> tuple[str, str]:
    """(verdict, what there is to say) of a check."""
    try:
        return "ok", check()
    except Absent as reason:
        return "-", str(reason)
    except UserError as error:
        return "FAIL", str(error)
    except (
        Exception
    ) as error:  # an import can fail in any way, and every failure belongs into the report
        where = traceback.extract_tb(error.__traceback__)[-1]
        return (
            "FAIL",
            f"{type(error).__name__}: {first_line(error)} ({where.filename}:{where.lineno})",
        )


def judge(world: World, name: str, check: Callable[[], str], together: bool = False) -> bool:
    """Prints on rank 0 what the first rank of each node finds, equal findings once. together: all ranks make the check,
    rank 0 has what there is to say. Returns there whether any failed, or packages differ."""
    found = (
        attempt(check)
        if together
        else world.run_local(lambda: () if world.local_rank else attempt(check))
    )
    said: dict[tuple[str, str], list[str]] = {}
    for rank, (node, finding) in enumerate(world.gather_on_rank0((machine.node_name(), found))):
        if finding and not (together and rank and finding[0] != "FAIL"):
            said.setdefault(finding, []).append(node)
    if len(said) > 1 and name in PACKAGES:
        said = {("FAIL", f"{text}; nodes differ"): nodes for (_, text), nodes in said.items()}
    for (verdict, text), nodes in said.items():
        where = f"{', '.join(dict.fromkeys(nodes))}: " if len(said) > 1 else ""
        Console().line(f"{verdict:<5}{name:<16}{where}{text}")
    return any(verdict == "FAIL" for verdict, _ in said)


def check_package(name: str) -> str:
    """Imports a package; returns its version. Raises what the import raises."""
    try:
        version = metadata.version(name)
    except metadata.PackageNotFoundError:
        if name not in OPTIONAL:
            raise
        raise Absent("not installed") from None
    module = importlib.import_module({"PyYAML": "yaml"}.get(name, name.replace("-", "_")))
    if name == "torch":
        cuda = f"CUDA {module.version.cuda}, {module.cuda.device_count()} GPUs here"
        return f"{version} ({cuda if module.version.cuda else 'without CUDA'})"
    return version


def check_project() -> str:
    """Imports the scripts and every module of the library that this torch can have."""
    names = {
        "training",
        "get_dataset",
        *(it.name for it in pkgutil.walk_packages(mamba_fsdp.__path__, "mamba_fsdp.")),
    }
    names -= {"mamba_fsdp.__main__"} | (set() if HAS_FSDP2 else {"mamba_fsdp.parallel.fsdp2"})
    if importlib.util.find_spec("triton") is None:  # modules of kernels import it
        names = {name for name in names if not name.rpartition(".")[2].startswith("triton_")}
    for name in sorted(names):
        importlib.import_module(name)
    return f"{len(names)} modules"


def check_environment() -> str:
    machine.check_version()
    return "made from this checkout's requirements"


def check_gpus() -> str:
    shown = machine.driver_gpus()
    if not shown:
        raise Absent("the NVIDIA driver shows none")
    if machine.assigned_gpus() > len(shown):
        raise UserError(
            f"Slurm assigned {machine.assigned_gpus()}, the driver shows {len(shown)}: {', '.join(shown)}"
        )
    if not torch.cuda.is_available():
        why = (
            f"is the driver too old for CUDA {torch.version.cuda}?"
            if torch.version.cuda
            else "it is built for CPUs"
        )
        raise UserError(
            f"the driver shows {len(shown)} x {shown[0]}, torch {torch.__version__} finds none; {why}"
        )
    about, peak = torch.cuda.get_device_properties(0), device_peak(shown[0])
    known = f"{peak / 1e12:.0f} TFLOP/s in bf16" if peak else "peak rate unknown, so no MFU"
    return f"{len(shown)} x {shown[0]}, {about.total_memory / 2**30:.0f} GiB, sm_{about.major}{about.minor}, {known}"


def check_efa() -> str:
    devices = [
        path for path in EFA_FOLDER.glob("*") if (path / "device/driver").resolve().name == "efa"
    ]
    if not devices:
        raise Absent("no devices")
    plugin = machine.efa_plugin()
    if not plugin:
        raise UserError(
            f"{len(devices)} devices, but no libnccl-net.so (aws-ofi-nccl) for NCCL to use them by, so it "
            "takes TCP; build the image with INSTALL_EFA=1 (docs/image.md)"
        )
    return f"{len(devices)} devices, {plugin}"


def check_operators(device: str) -> str:
    """Chooses each operator's backend; returns them with what keeps better backends away."""
    config = ModelConfig(layers="mamba1,mamba2,attention", d_model=1024)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    return str(resolve_backends("auto", device, operator_uses(config, dtype)))


def check_training(device: str) -> str:
    """Trains a step; returns how the loss moved. Raises UserError where it did not fall."""
    config = ModelConfig(
        d_model=64, n_layer=2, layers="mamba1,mamba2", vocab_size=256, d_state=16, headdim=16
    )
    model = MambaLM(
        config,
        backends=resolve_backends("auto", device, operator_uses(config, torch.float32)).backends,
    )
    with torch.no_grad():
        for (name, described), parameter in zip(parameters(config).items(), model.parameters()):
            parameter.copy_(initial_value(name, described, 0))
    model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    tokens = torch.arange(2 * 64, device=device).reshape(2, 64)
    before = model(tokens[:, :-1], labels=tokens[:, 1:]) / tokens[:, 1:].numel()
    before.backward()
    optimizer.step()
    after = model(tokens[:, :-1], labels=tokens[:, 1:]) / tokens[:, 1:].numel()
    if not after < before:
        raise UserError(f"a training step did not lower the loss: {before:.4f}, then {after:.4f}")
    return f"one step: loss {before:.4f}, then {after:.4f}"


def check_triton_cache() -> str:
    if importlib.util.find_spec("triton") is None:
        raise Absent("no Triton")
    from triton.runtime.cache import get_cache_manager

    folder = Path(os.environ.get("TRITON_CACHE_DIR") or Path.home() / ".triton" / "cache")
    writer = type(get_cache_manager("00" * 32)).__name__  # Rank0CacheManager: see patches/
    return f"{folder} on {file_system(folder)}, written by {writer}"


def file_system(path: str | Path) -> str:
    """The type of the file system that a path lies on, as in /proc/mounts; "an unknown disk" where there is none."""
    real, kinds = os.path.realpath(path), {"": "an unknown disk"}
    with contextlib.suppress(OSError):  # macOS has no such file
        kinds |= {
            line.split()[1]: line.split()[2]
            for line in Path("/proc/mounts").read_text().splitlines()
        }
    return kinds[max((top for top in kinds if Path(real).is_relative_to(top or "/")), key=len)]


def measure_ranks(world: World) -> str:
    """How fast an all-reduce goes, and the slowest way from a rank to one of the next node (or the next rank)."""
    if world.size == 1:
        raise Absent(
            "one process: start one a GPU with srun or torchrun to measure what they send each other"
        )
    data = torch.ones(MEGABYTES * 250_000, device=world.device)
    received, stride = torch.empty_like(data), world.local_size % world.size or 1
    to, source = (world.rank + stride) % world.size, (world.rank - stride) % world.size

    def timed(act):
        def once():
            world.barrier()
            began = time.perf_counter()
            act()
            float(data[0])  # which waits for a GPU
            return time.perf_counter() - began

        return statistics.median(
            [once() for _ in range(ROUNDS + 1)][1:]
        )  # the first one makes connections

    def shift():
        sends = [dist.P2POp(dist.isend, data, to), dist.P2POp(dist.irecv, received, source)]
        for request in dist.batch_isend_irecv(sends):
            request.wait()
        float(received[0])

    seconds = timed(lambda: world.all_reduce_sum(data))
    if not (told := world.gather_on_rank0((timed(shift), world.rank, to, machine.node_name()))):
        return ""
    slowest, rank, other, _ = max(told)
    bus = 2 * (world.size - 1) / world.size * data.nbytes / seconds / 1e9  # as nccl-tests count
    nodes = len({node for *_, node in told})
    return (
        f"{world.size} on {nodes} node{'s' * (nodes > 1)} over {dist.get_backend()}: all-reduce of "
        f"{MEGABYTES} MB {bus:.3g} GB/s (bus); slowest way, rank {rank} to {other}: "
        f"{data.nbytes / slowest / 1e9:.3g} GB/s"
    )


def measure_folder(world: World, folder: str) -> str:
    """Each node writes a file and reads that of another node. Raises UserError where it can't."""
    if not folder:
        raise Absent("name one to measure its speed: doctor FOLDER")
    place = world.on_rank0(lambda: hidden_beside(Path(folder, "doctor")))
    world.on_rank0(lambda: seconds_of(place.mkdir, f"make a folder in {folder}"))
    nodes = world.broadcast_object(list(dict.fromkeys(world.gather_on_rank0(machine.node_name()))))
    other = nodes[(nodes.index(machine.node_name()) + 1) % len(nodes)]
    try:
        seconds = [
            world.on_all_ranks(
                lambda: 0.0 if world.local_rank else write_file(place / machine.node_name())
            ),
            world.on_all_ranks(lambda: 0.0 if world.local_rank else read_file(place / other)),
        ]
    finally:
        world.on_rank0(lambda: shutil.rmtree(place, ignore_errors=True))
    if not (told := world.gather_on_rank0(seconds)):
        return ""
    writes, reads = (MEGABYTES / 1e3 / max(each) for each in zip(*told))
    return (
        f"{folder} on {file_system(folder)}: {'a node' if len(nodes) > 1 else 'this machine'} writes {writes:.3g} "
        f"GB/s and reads {reads:.3g} GB/s; {shutil.disk_usage(folder).free / 1e9:,.0f} GB free"
    )


def write_file(path: Path) -> float:
    """Seconds that MEGABYTES take to be on the disk."""

    def write():
        with open(path, "xb") as file:
            file.writelines(blocks)
            file.flush()
            os.fsync(file.fileno())
            os.posix_fadvise(
                file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED
            )  # for whoever reads it here

    blocks = [os.urandom(1_000_000)] * MEGABYTES
    return seconds_of(write, f"write {path.parent}")


def read_file(path: Path) -> float:
    """Seconds that it takes to read what another node has written."""
    return seconds_of(
        partial(shutil.copyfile, path, os.devnull),
        f"read what {path.name} wrote to "
        f"{path.parent.parent}; is it one folder, on a file system that the nodes share?",
    )


def seconds_of(act: Callable[[], object], what: str) -> float:
    """Raises UserError: `what` this node can't."""
    began = time.perf_counter()
    try:
        act()
    except OSError as error:
        raise UserError(f"{machine.node_name()}: {error.strerror}: can't {what}") from None
    return time.perf_counter() - began
