"""Tests ./1.train.sbatch with the real training program, if its terminal window closes, if the process that
reads its output exits, and if it is killed."""

import contextlib
import os
import re
import signal
import subprocess
from pathlib import Path

import numpy as np
import pytest

from mamba_fsdp.run import records
from tests.support.corpora import write_store
from tests.support.processes import wait_until
from tests.support.projects import make_project, make_venv
from tests.support.tiny import TINY, format_arguments

pytestmark = pytest.mark.slow
SETTINGS = TINY | {
    "dataset_path": "store",
    "save_ckpt_path": "run",
    "batch_size": 1,
    "eval_interval": 0,
    "eval_batches": -1,
    "checkpoint_interval": 100_000,
}
# While the file spins-RANK exists, the rank hangs in a loop of Python, and makes the file spins-RANK-seen.
SPINS = """

import time

look_once = StopRequest.check

def look_or_spin(request):
    spins = "spins-" + os.environ["RANK"]
    while os.path.exists(spins):
        open(spins + "-seen", "w").close()
        time.sleep(0.01)
    return look_once(request)

StopRequest.check = look_or_spin
"""
KILLS = int(os.environ.get("KILLS", 2))
VICTIMS = ["the script", "the launcher", "rank 1", "rank 0"]
HANGS = ["stands still", "spins", ""]  # states of another rank at the time of the kill


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    folder = make_project(tmp_path_factory.mktemp("real") / "project", training=None)
    with open(folder / "mamba_fsdp/trainer/stopping.py", "a") as stopping:
        stopping.write(SPINS)
    make_venv(folder)
    return folder


def clear(project):
    """Removes the run and the files that make ranks spin."""
    subprocess.run("rm -rf run spins-*", shell=True, check=True, cwd=project)


def make_spin(project, rank):
    """Makes a rank spin, and waits until it does."""
    (project / f"spins-{rank}").touch()
    wait_until((project / f"spins-{rank}-seen").exists)


@pytest.fixture
def command(project):
    """Returns a function command(steps) that returns the command which trains this number of steps in project/run.
    Removes an earlier run."""
    clear(project)
    if not (project / "store").exists():
        document = np.random.default_rng(0).integers(1, 64, 20_000)
        write_store(project / "store", [document], vocab_size=64, eos=0, tokenizer="none")
    return lambda steps: ["./1.train.sbatch", *format_arguments(SETTINGS | {"num_steps": steps})]


@pytest.fixture
def start(project, command, tmp_path):
    """Returns a function start(*words, **environment) that starts a launcher with two ranks, waits for six entries of
    metrics.jsonl, and returns the Popen of the launcher.

    The temporary files of the launcher are in tmp_path/scratch, and its output is in tmp_path/log.
    """

    def start(*arguments, **environment):
        clear(project)
        (tmp_path / "scratch").mkdir()
        more = {"PROCESSES_PER_NODE": "2", "TMPDIR": str(tmp_path / "scratch"), **environment}
        with open(tmp_path / "log", "w") as log:
            process = subprocess.Popen(
                [*command(100_000), *arguments],
                cwd=project,
                env={**os.environ, **more},
                stdout=log,
                stderr=log,
            )
        metrics = project / "run/metrics.jsonl"
        wait_until(lambda: metrics.exists() and metrics.read_bytes().count(b"\n") >= 6)
        return process

    return start


def test_ctrl_c_is_not_forgotten_when_a_rank_dies_before_its_step_ends(project, start, tmp_path):
    """If a rank dies after Ctrl-C and before it stops, ranks are not restarted, and the status of the run does not stay
    `running`."""
    process = start("--checkpoint_interval=5")
    wait_until(lambda: list(project.glob("run/checkpoints/*/COMMIT")))
    make_spin(project, 1)
    process.send_signal(signal.SIGINT)
    wait_until(lambda: list(project.glob("run/starts/*/STOP")))
    os.kill(tree_of(tmp_path / "scratch")["rank 0"], signal.SIGKILL)
    assert process.wait(400) == 128 + signal.SIGKILL
    output = (tmp_path / "log").read_text()
    assert "fsdp on 2 x cpu" in output and "restarts   the ranks" not in output, output
    first, reason, last = output.splitlines()[-3:]
    assert first.startswith("rank 0 on ") and first.endswith(" failed first.")
    assert "killed by SIGKILL. The most likely cause is that the node ran out of memory" in reason
    assert last.startswith("to resume from step_")
    assert [event["event"] for event in records.read_events(project / "run")].count("started") == 1
    assert "ended without writing its status" in (project / "run/status.json").read_text()


def test_a_run_with_nohup_continues_without_its_terminal_and_its_reader(project, command, terminal):
    """Under nohup, a run finishes although its window closes and the reader of its output exits. The window closes just
    before the first step."""
    words = " ".join(["nohup", *command(40)]) + " 2>&1 | head -5 > log"
    (project / "spins-0").touch()
    terminal.start(["bash", "-c", words], cwd=project)
    wait_until((project / "spins-0-seen").exists)
    terminal.close()
    (project / "spins-0").unlink()
    wait_until(lambda: records.read_status(project / "run").get("status") == "finished")
    assert len((project / "log").read_text().splitlines()) == 5


def tree_of(scratch):
    """Returns {"the script", "the launcher" or "rank N": pid} of the processes whose TMPDIR is in this folder."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words = (folder / "cmdline").read_text()
            environment = (folder / "environ").read_text()
            if words and f"TMPDIR={scratch}" in environment:
                rank = re.search(r"\0RANK=(\d)", environment)
                usual = "the launcher" if "launch.node" in words else words
                found[f"rank {rank[1]}" if rank else usual] = int(folder.name)
    return found


def shared_memory_of(tree):
    """Returns the files in /dev/shm that these processes have mapped."""
    maps = "".join(Path(f"/proc/{pid}/maps").read_text() for pid in tree.values())
    return set(re.findall(r"/dev/shm/\S+", maps))


@pytest.mark.parametrize("number", range(KILLS))
def test_kill_9_of_any_process_leaves_nothing(project, start, tmp_path, number):
    """After SIGKILL of any process of a run, no process remains, and no file in TMPDIR or /dev/shm, even if a rank
    hangs.

    KILLS=60 kills each process in each state of another rank five times.
    """
    victim = VICTIMS[number % len(VICTIMS)]
    hang = HANGS[number % len(HANGS)]
    process = start(MAX_RESTARTS="0")
    scratch = tmp_path / "scratch"
    tree = {**tree_of(scratch), "the script": process.pid}
    assert {*VICTIMS} <= tree.keys() and list(scratch.iterdir())
    shared = shared_memory_of(tree)
    hung = "rank 1" if victim == "rank 0" else "rank 0"
    if hang == "stands still":
        os.kill(tree[hung], signal.SIGSTOP)
    elif hang == "spins":
        make_spin(project, hung[-1])
    os.kill(tree[victim], signal.SIGKILL)
    process.wait(400)
    try:
        wait_until(lambda: not tree_of(scratch) and not list(scratch.iterdir()))
    finally:
        for pid in tree_of(scratch).values():
            os.kill(pid, signal.SIGKILL)
    assert not [path for path in shared if os.path.exists(path)]
