"""python -m mamba_fsdp doctor [FOLDER]

What this machine has and whether it works: packages, environment, GPUs, EFA, the backend that serves each operator,
Triton's cache. A verdict a line: `ok`, `FAIL`, or `-` for what is not here and need not be. FOLDER: where runs are to
lie; each node's speed there is measured too, with a file that is removed again. Exits with 1 where any fails.

On a cluster it tells of every node, and how fast the ranks talk to each other. One task a GPU:

    srun --nodes=2 --ntasks-per-node=8 --gpus-per-node=8 .venv/bin/python -m mamba_fsdp doctor /fsx/runs
"""

import contextlib
import os
import re
import shutil
import time
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from mamba_fsdp.errors import UserError
from mamba_fsdp.launch import machine
from mamba_fsdp.parallel.world import World, start_world
from mamba_fsdp.report.console import Console
from mamba_fsdp.storage import hidden_beside
from mamba_fsdp.verbs.checks import CHECKS, Absent, Check, Finding

MEGABYTES = 256  # that speeds are measured with
ROUNDS = 5


def main(folder: str = "") -> int:
    """Returns 1 where anything fails, else 0."""
    join_step()
    world = start_world()
    failed = False
    with contextlib.closing(world):
        for check in (*CHECKS, Check("folder", partial(measure_folder, folder))):
            finding = world.run_local(partial(make_on_node, world, check))
            failed |= print_findings(world, check.name, finding)
        ranks = Check("ranks", partial(measure_ranks, world)).make()
        is_told = world.rank == 0 or ranks.verdict == "FAIL"
        failed |= print_findings(world, "ranks", ranks if is_told else None)
    return 1 if failed else 0


def make_on_node(world: World, check: Check) -> Finding | None:
    """Makes the check on the first rank of each node."""
    return None if world.local_rank else check.make()


def join_step() -> None:
    """Sets what torchrun would, where srun has started several tasks."""
    step = os.environ
    if "RANK" in step or int(step.get("SLURM_STEP_NUM_TASKS", 1)) == 1:
        return
    host = "".join(re.findall(r"^([^,[]+)(?:\[(\d+))?", step["SLURM_STEP_NODELIST"])[0])
    port = 20000 + (7 * int(step["SLURM_JOB_ID"]) + int(step["SLURM_STEP_ID"])) % 10000
    step |= {
        "RANK": step["SLURM_PROCID"],
        "WORLD_SIZE": step["SLURM_STEP_NUM_TASKS"],
        "LOCAL_RANK": step["SLURM_LOCALID"],
        "LOCAL_WORLD_SIZE": re.findall(r"\d+", step["SLURM_STEP_TASKS_PER_NODE"])[0],
        "MASTER_ADDR": host,
        "MASTER_PORT": str(port),
    }
    interface = machine.interface_towards([host, step.get("SLURM_LAUNCH_NODE_IPADDR", "")])
    if interface:
        step.setdefault("GLOO_SOCKET_IFNAME", interface)


def print_findings(world: World, name: str, finding: Finding | None) -> bool:
    """Prints on rank 0 what the ranks have found, equal findings once; returns there whether any failed."""
    nodes_of: dict[Finding, list[str]] = {}
    for node, found in world.gather_on_rank0((machine.node_name(), finding)):
        if found:
            nodes_of.setdefault(found, []).append(node)
    for found, nodes in nodes_of.items():
        where = f"{', '.join(dict.fromkeys(nodes))}: " if len(nodes_of) > 1 else ""
        Console().line(f"{found.verdict:<5}{name:<16}{where}{found.text}")
    return any(found.verdict == "FAIL" for found in nodes_of)


def measure_ranks(world: World) -> str:
    """Returns how fast an all-reduce goes over all ranks."""
    if world.size == 1:
        raise Absent(
            "one process: start one a GPU with srun or torchrun to measure what they send each other"
        )
    data = torch.ones(MEGABYTES * 250_000, device=world.device)
    seconds = []
    for _ in range(ROUNDS + 1):
        world.barrier()
        began = time.perf_counter()
        world.all_reduce_sum(data)
        float(data[0])  # which waits for a GPU
        seconds.append(time.perf_counter() - began)
    fastest = min(seconds[1:])  # the first one makes connections
    bus = 2 * (world.size - 1) / world.size * data.nbytes / fastest / 1e9  # as nccl-tests count
    return (
        f"{world.size} over {dist.get_backend()}: all-reduce of {MEGABYTES} MB {bus:.3g} GB/s (bus)"
    )


def measure_folder(folder: str) -> str:
    """Returns how fast this machine writes and reads there. Raises UserError where it can't."""
    if not folder:
        raise Absent("name one to measure its speed: doctor FOLDER")
    file = hidden_beside(Path(folder, "doctor"))
    try:
        began = time.perf_counter()
        write_file(file)
        written = time.perf_counter()
        shutil.copyfile(file, os.devnull)
        reading = time.perf_counter() - written
    except OSError as error:
        raise UserError(f"{error.strerror}: can't write and read in {folder}") from None
    finally:
        file.unlink(missing_ok=True)
    free = shutil.disk_usage(folder).free
    return (
        f"{folder}: writes {MEGABYTES / 1e3 / (written - began):.3g} GB/s and reads "
        f"{MEGABYTES / 1e3 / reading:.3g} GB/s; {free / 1e9:,.0f} GB free"
    )


def write_file(path: Path) -> None:
    """Writes MEGABYTES to the disk."""
    with open(path, "xb") as file:
        block = os.urandom(1_000_000)
        file.writelines([block] * MEGABYTES)
        file.flush()
        os.fsync(file.fileno())
        # It shall not be read from memory.
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
