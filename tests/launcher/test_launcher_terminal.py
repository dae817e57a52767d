"""./1.train.sbatch and the real training program, in a terminal or before a reader that goes away."""

import json
import os
import subprocess
import time

import numpy as np
import pytest

from mamba_fsdp.data.store import StoreWriter
from tests.support.projects import make_project, make_venv

pytestmark = pytest.mark.slow
CLEAN = {name: value for name, value in os.environ.items() if not name.startswith("SLURM")}
SETTINGS = [
    "--dataset_path=store",
    "--save_ckpt_path=run",
    "--d_model=16",
    "--n_layer=1",
    "--vocab_size=64",
    "--seq_length=32",
    "--batch_size=1",
    "--mixed_precision=fp32",
    "--kernels=reference",
    "--eval_interval=0",
    "--report_interval=1",
    "--checkpoint_interval=100000",
]


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    folder = make_project(tmp_path_factory.mktemp("real") / "project", training=None)
    make_venv(folder)
    return folder


@pytest.fixture
def command(project):
    """command(steps) -> what trains so many in project/run, a new folder."""
    subprocess.run(["rm", "-rf", project / "run"], check=True)
    if not (project / "store").exists():
        writer = StoreWriter(project / "store", vocab_size=64, eos=0, tokenizer="none")
        writer.append([*np.random.default_rng(0).integers(1, 64, 20_000).tolist(), writer.eos])
        writer.finish()
    return lambda steps: ["./1.train.sbatch", *SETTINGS, f"--num_steps={steps}"]


def wait_for_steps(run, count):
    end = time.monotonic() + 400
    while (
        not (run / "metrics.jsonl").exists()
        or (run / "metrics.jsonl").read_bytes().count(b"\n") < count
    ):
        assert time.monotonic() < end, "the run came to no step"
        time.sleep(0.05)


def wait_for_end(run):
    """Of a run whose launcher may be gone; returns its status."""
    end = time.monotonic() + 400
    while (
        not (run / "status.json").exists()
        or json.loads((run / "status.json").read_text())["status"] == "running"
    ):
        assert time.monotonic() < end, "the run did not end"
        time.sleep(0.05)
    return json.loads((run / "status.json").read_text())


def test_a_terminal_that_closes_stops_the_run_with_a_checkpoint(project, command, terminal):
    process = terminal.start(command(100_000), cwd=project, env=CLEAN)
    wait_for_steps(project / "run", 20)
    terminal.close()
    assert process.wait(400) == 130
    status = wait_for_end(project / "run")
    assert (status["status"], status["reason"]) == ("stopped", "SIGHUP")
    assert (project / f"run/checkpoints/step_{status['step']:08d}/COMMIT").exists()


def test_under_nohup_it_trains_on(project, command, terminal):
    process = terminal.start(["nohup", *command(400)], cwd=project, env=CLEAN)
    wait_for_steps(project / "run", 20)
    terminal.close()
    assert process.wait(400) == 0 and wait_for_end(project / "run")["status"] == "finished"


def test_ctrl_c_that_ends_the_reader_too_stops_the_run_with_a_checkpoint(
    project, command, terminal
):
    """`./1.train.sbatch | tee log`: the terminal sends SIGINT to both, and nobody reads what is said then."""
    process = terminal.start(
        ["bash", "-c", " ".join(command(100_000)) + " 2>&1 | tee log"], cwd=project, env=CLEAN
    )
    wait_for_steps(project / "run", 20)
    terminal.type("\x03")
    process.wait(400)
    status = wait_for_end(project / "run")
    assert (status["status"], status["reason"]) == ("stopped", "SIGINT")
    assert (project / f"run/checkpoints/step_{status['step']:08d}/COMMIT").exists()
    resumed = subprocess.run(
        command(status["step"] + 1), cwd=project, env=CLEAN, capture_output=True, text=True
    )
    assert resumed.returncode == 0 and f", step {status['step']}\n" in resumed.stdout, resumed


def test_a_reader_that_has_seen_enough_lets_it_train(project, command):
    process = subprocess.Popen(
        ["bash", "-c", " ".join(command(60)) + " 2>&1 | head -5; exit ${PIPESTATUS[0]}"],
        cwd=project,
        env=CLEAN,
        stdout=subprocess.PIPE,
        text=True,
    )
    said, _ = process.communicate(timeout=400)
    assert process.returncode == 0 and len(said.splitlines()) == 5
    assert wait_for_end(project / "run")["status"] == "finished"
