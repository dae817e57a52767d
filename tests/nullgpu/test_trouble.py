"""A GPU that is lost, full or stuck: a message, an exit code, no half-written checkpoint, and the same command resumes."""

import json

import pytest

pytestmark = pytest.mark.slow

MOST_SECONDS = 900  # of a hang; it takes a tenth
LAUNCHES_OF_THREE_STEPS = 250
SETTINGS = {
    "use_dummy_dataset": "true",
    "layers": "mamba2",
    "n_layer": 2,
    "d_model": 256,
    "vocab_size": 512,
    "seq_length": 256,
    "batch_size": 2,
    "num_steps": 8,
    "checkpoint_interval": 2,
    "eval_interval": 0,
    "num_workers": 0,
    "publish": "false",
}


@pytest.fixture
def run(start):
    """run(run folder, NULLGPU_... or setting=value ...) -> (exit code, stderr) of training.py."""

    def run(folder, **more):
        variables = {name: value for name, value in more.items() if name.startswith("NULLGPU")}
        settings = {name: value for name, value in more.items() if name not in variables}
        settings = SETTINGS | {"save_ckpt_path": folder} | settings
        words = [f"--{name}={value}" for name, value in settings.items()]
        process = start("training.py", *words, **variables)
        _, stderr = process.communicate(timeout=MOST_SECONDS)
        return process.returncode, stderr

    return run


def whole_checkpoints(folder):
    """The names of a run's checkpoints, each of which is committed."""
    found = sorted((folder / "checkpoints").iterdir())
    assert all((path / "COMMIT").exists() for path in found)
    return [path.name for path in found]


@pytest.mark.pinned
def test_a_gpu_lost_in_the_first_minute_is_told(run, tmp_path):
    code, stderr = run(tmp_path / "run", NULLGPU_LOST=200)
    assert code == 1 and "the GPU is lost: start again" in stderr
    assert whole_checkpoints(tmp_path / "run") == []


@pytest.mark.torch22
def test_a_gpu_lost_in_mid_run_costs_the_steps_since_the_last_checkpoint(run, tmp_path):
    """The runs lie in folders of their own, so that each chooses its kernels and launches as many."""
    report = tmp_path / "report.json"
    assert run(tmp_path / "whole/run", NULLGPU_REPORT=report)[0] == 0
    counted = json.loads(report.read_text())
    launches = counted["torch_launches"] + counted["triton_launches"]
    folder = tmp_path / "lost/run"
    code, stderr = run(folder, NULLGPU_LOST=launches - LAUNCHES_OF_THREE_STEPS)
    assert code == 1 and "unspecified launch failure" in stderr
    before = whole_checkpoints(folder)
    assert before and before[-1] < "step_00000008"
    assert run(folder)[0] == 0
    assert "step_00000008" in whole_checkpoints(folder)


@pytest.mark.pinned
def test_a_stuck_kernel_ends_the_rank_with_its_stacks(run, tmp_path):
    code, stderr = run(tmp_path / "run", NULLGPU_HANG=500, timeout_minutes=0.1)
    assert code == 1
    assert "rank 0 made no progress for 0.1 minutes" in stderr and "Thread 0x" in stderr
    assert whole_checkpoints(tmp_path / "run") == []


@pytest.mark.pinned
def test_a_full_gpu_is_told(run, tmp_path):
    code, stderr = run(tmp_path / "run", NULLGPU_MEMORY=30 << 20)
    assert code == 1 and "has too little memory: lower batch_size" in stderr
    assert "CUDA out of memory" in stderr and "Traceback" not in stderr
    assert whole_checkpoints(tmp_path / "run") == []
