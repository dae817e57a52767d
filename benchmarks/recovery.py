"""What a lost rank or node costs: `python -m benchmarks.recovery [MINUTES]`, as root where Slurm is installed.

Seconds from a kill to the next step, of a demo run of two ranks on this machine under this launcher and under plain
torchrun, in turn; the same when a node of a throw-away Slurm is lost, with and without a spare one; the goodput of a
demo run of MINUTES (default 5) with a kill a minute. data/builtin must be there: ./1.train.sbatch makes it.
"""

import contextlib
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from mamba_fsdp.report.records import read, read_events
from mamba_fsdp.run_layout import METRICS

PROJECT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(PROJECT / "tests/slurm"), str(PROJECT / "tests/launcher")]
RUNS = 3
DEMO = ["--config=config/demo.yaml", "--num_steps=100000", "--report_interval=1", "--eval_interval=0",
        "--checkpoint_interval=5"]
MEETING = ["--nnodes=1", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"]


def launch(folder, *, ours):
    words = (["-m", "mamba_fsdp.launch.node", folder / "run/failures/1.0", *MEETING] if ours else
             ["-m", "torch.distributed.run", *MEETING, "--nproc-per-node=2", "--max-restarts=99"])
    command = [sys.executable, *words, "training.py", *DEMO, f"--save_ckpt_path={folder}/run"]
    with open(folder / "log", "w") as log:
        return subprocess.Popen(command, stdout=log, stderr=log, cwd=PROJECT, env={
            **os.environ, "PROCESSES_PER_NODE": "2", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(PROJECT)})


def descendants(pid):
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        yield int(child)
        yield from descendants(child)


def kill_a_rank(process):
    os.kill([pid for pid in descendants(process.pid) if os.getsid(pid) == pid][-1], signal.SIGKILL)


def wait_until(happened, what):
    end = time.monotonic() + 400
    while not (value := happened()):
        if time.monotonic() > end:
            raise SystemExit(f"never came: {what}")
        time.sleep(0.05)
    return value


def count(run, event):
    return sum(entry["event"] == event for entry in read_events(run))


def until_next_step(run, kill):
    """Seconds from `kill` to the first step of the start after it, once the run has a checkpoint of this start."""
    saved = count(run, "checkpoint")
    wait_until(lambda: count(run, "checkpoint") > saved, "a checkpoint")
    begun, began = count(run, "started"), time.monotonic()
    kill()
    wait_until(lambda: count(run, "started") > begun, "another start")
    before = (run / METRICS).stat().st_size
    wait_until(lambda: (run / METRICS).stat().st_size > before, "a step")
    return time.monotonic() - began


def in_turn():
    """{launcher: seconds}, of a kill in each of RUNS runs."""
    seconds = {"a rank, this launcher": [], "a rank, plain torchrun": []}
    for _ in range(RUNS):
        for name, values in seconds.items():
            with tempfile.TemporaryDirectory() as folder:
                process = launch(Path(folder), ours="this" in name)
                values.append(until_next_step(Path(folder, "run"), lambda process=process: kill_a_rank(process)))
                end(process)
    return seconds


def end(process):
    ranks = [*descendants(process.pid)]
    for pid in [process.pid, *ranks]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait()


def goodput(minutes):
    with tempfile.TemporaryDirectory() as root:
        process, run = launch(Path(root), ours=True), Path(root, "run")
        wait_until(lambda: count(run, "checkpoint"), "a checkpoint")
        for _ in range(minutes):
            time.sleep(60)
            kill_a_rank(process)
        time.sleep(60)
        end(process)
        return read(run / METRICS)[-1]["goodput"], count(run, "recovered")


def in_slurm(spares):
    """Seconds after a node is lost."""
    import cluster as slurm
    import projects
    with tempfile.TemporaryDirectory() as root:
        project = projects.make_project(Path(root, "project"), training=None)
        projects.make_venv(project)
        (project / "data").symlink_to(PROJECT / "data")
        with slurm.Cluster(Path(root, "cluster"), nodes=3, shared=[project]) as cluster:
            job = cluster.submit(project, *DEMO, f"--spares={spares}", "--save_ckpt_path=runs/a",
                                 options=[f"--nodes={2 + spares}", "--exclude=node3"][:2 - spares],
                                 env={"OMP_NUM_THREADS": "1"})

            def kill():
                cluster.kill_node("node2")
                if not spares:  # the node is switched on again at once: what is left is Slurm's queue
                    cluster.wait_until(lambda: cluster.state(job) == "PENDING", "the job is queued again")
                    cluster.start_node("node2")
                    cluster.release(job)
            return until_next_step(project / "runs/a", kill)


def main(minutes=5):
    seconds = in_turn()
    ours, plain = (statistics.median(values) for values in seconds.values())
    print(f"{'seconds from a kill to the next step':<52}{'median':>8}{'min':>8}{'max':>8}")
    for name, values in [*seconds.items(), ("a node, with a spare one (Slurm)", [in_slurm(1)]),
                         ("a node, without: queued again, and there at once", [in_slurm(0)])]:
        print(f"{name:<52}{statistics.median(values):>8.1f}{min(values):>8.1f}{max(values):>8.1f}", flush=True)
    print(f"a rank: {ours / plain:.2f} times the seconds of plain torchrun", flush=True)
    share, kills = goodput(minutes)
    print(f"goodput with a kill a minute, {kills} of them: {share:.1%}")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
