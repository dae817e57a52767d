"""Tests trainings on a GPU that is lost, full or stuck: they exit with a message and without an incomplete checkpoint,
and the same command resumes."""

import pytest

pytestmark = pytest.mark.slow

# A number of launches that is reached during the training: the check of the kernels makes fewer, all steps make more.
IN_MID_RUN = 20_000
SETTINGS = {
    "use_dummy_dataset": "true",
    "layers": "mamba2",
    "n_layer": 2,
    "d_model": 64,
    "d_state": 16,
    "headdim": 32,
    "vocab_size": 512,
    "seq_length": 256,
    "batch_size": 2,
    "num_steps": 10_000,
    "checkpoint_interval": 2,
    "eval_interval": 0,
    "num_workers": 0,
    "publish": "false",
    "recipe": "published",
}


@pytest.fixture
def trained(run, tmp_path):
    """Returns a function trained(NULLGPU_... or setting=value ...) that runs a training which fails, and returns (the
    output of training.py, the names of its checkpoints). It asserts that all checkpoints are committed."""

    def trained(**more):
        variables = {name: value for name, value in more.items() if name.startswith("NULLGPU")}
        settings = SETTINGS | {"save_ckpt_path": tmp_path / "run"} | more
        words = [f"--{name}={settings[name]}" for name in settings.keys() - variables.keys()]
        code, output = run("training.py", *words, **variables)
        assert code == 1, output
        found = sorted((tmp_path / "run/checkpoints").iterdir())
        assert all((path / "COMMIT").exists() for path in found)
        return output, [path.name for path in found]

    return trained


# {fault before the first step: (variables and settings that cause it, part of the message)}
TROUBLE = {
    "lost": ({"NULLGPU_LOST": 200}, "the GPU is lost: start again"),
    "stuck": (
        {"NULLGPU_HANG": 500, "timeout_minutes": 0.1},
        "rank 0 made no progress for 0.1 minutes",
    ),
    "full": ({"NULLGPU_MEMORY": 30 << 20}, "has too little memory: lower batch_size"),
}


@pytest.mark.pinned
@pytest.mark.parametrize("kind", TROUBLE)
def test_a_failing_gpu_is_reported(trained, kind):
    how, words = TROUBLE[kind]
    output, checkpoints = trained(**how)
    assert words in output and "Traceback" not in output and not checkpoints
    if kind == "stuck":
        assert "Thread 0x" in output  # the watchdog prints the stacks


@pytest.mark.torch22
def test_a_gpu_lost_in_mid_run_costs_the_steps_since_the_last_checkpoint(trained):
    output, checkpoints = trained(NULLGPU_LOST=IN_MID_RUN)
    assert "unspecified launch failure" in output
    output, later = trained(NULLGPU_LOST=IN_MID_RUN)
    assert f"checkpoints/{checkpoints[-1]}, step" in output
    assert later[-1] > checkpoints[-1]
