"""A GPU that is lost, full or stuck: a message, an exit code, no half-written checkpoint, and the same command resumes."""

import json

import pytest

pytestmark = [pytest.mark.pinned, pytest.mark.slow]

MOST_SECONDS = 200
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
def run(start, tmp_path):
    """run(NULLGPU_...=value, setting=value ...) -> (exit code, stderr), of training.py in tmp_path."""

    def run(variables=None, **settings):
        words = ["-m", "tests.support.nullgpu.program", "training.py"]
        settings = SETTINGS | {"save_ckpt_path": tmp_path / "run"} | settings
        words += [f"--{name}={value}" for name, value in settings.items()]
        process = start(*words, **(variables or {}))
        _, stderr = process.communicate(timeout=MOST_SECONDS)
        return process.returncode, stderr

    return run


def whole_checkpoints(folder):
    """The names of a run's checkpoints, each of which is committed."""
    found = sorted(path.name for path in (folder / "run/checkpoints").iterdir())
    assert all((folder / "run/checkpoints" / name / "COMMIT").exists() for name in found)
    return found


def test_a_lost_gpu_costs_the_steps_since_the_last_checkpoint(run, tmp_path):
    """Whether it is lost while kernels are tested or while steps are taken."""
    report = tmp_path / "report.json"
    whole = {"save_ckpt_path": tmp_path / "whole"}
    assert run({"NULLGPU_REPORT": report}, **whole)[0] == 0
    counted = json.loads(report.read_text())
    launches = counted["torch_launches"] + counted["triton_launches"]
    code, stderr = run({"NULLGPU_LOST": launches // 20})
    assert code == 1 and "the GPU is lost: start again" in stderr
    assert whole_checkpoints(tmp_path) == []
    # The kernels of this run are tested but not chosen again, so that there are fewer launches.
    code, stderr = run({"NULLGPU_LOST": launches - 100})
    assert code == 1 and "CUDA error" in stderr
    before = whole_checkpoints(tmp_path)
    assert run()[0] == 0
    assert set(before) <= set(whole_checkpoints(tmp_path))
    assert json.loads((tmp_path / "run/status.json").read_text())["status"] == "finished"


def test_a_stuck_kernel_ends_the_rank_with_its_stacks(run, tmp_path):
    """Where kernels are tested, as in the steps, the watchdog sees it."""
    code, stderr = run({"NULLGPU_HANG": 500}, timeout_minutes=0.1)
    assert code == 1
    assert "rank 0 made no progress for 0.1 minutes" in stderr and "Thread 0x" in stderr
    assert whole_checkpoints(tmp_path) == []


def test_a_full_gpu_is_told(run, tmp_path):
    code, stderr = run({"NULLGPU_MEMORY": 30 << 20})
    assert code == 1 and "CUDA out of memory" in stderr
    assert whole_checkpoints(tmp_path) == []
