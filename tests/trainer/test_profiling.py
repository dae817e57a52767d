"""Tests the profile of steps, the measured speed of training, and the errors about too little memory."""

import json
import re
import time

import pytest
import torch

from mamba_fsdp.errors import UserError
from mamba_fsdp.parallel.world import World
from mamba_fsdp.planning.devices import Instance
from mamba_fsdp.trainer import run
from mamba_fsdp.trainer.profiling import DATA
from mamba_fsdp.trainer.setup import check_memory


@pytest.mark.slow
def test_a_run_prints_a_profile(train, tmp_path):
    printed = train(tmp_path / "run", use_profiler=True, num_steps=8, eval_interval=0)
    assert "profile    3 steps, sorted by device time:" in printed and "aten::" in printed
    events = json.loads((tmp_path / "run/profile/rank_0.json").read_text())["traceEvents"]
    names = [each["name"] for each in events]
    assert names.count(DATA) == 3 and {f"ProfilerStep#{step}" for step in (4, 5, 6)} <= {*names}


def test_the_speed_of_training_is_measured_without_leaving_files(
    settings_of, tmp_path, monkeypatch
):
    """measure_tokens_per_second times at least three steps, here of 64 tokens, and leaves no files."""
    monkeypatch.setattr(run, "MIN_TIMED_SECONDS", 0.0)
    began = time.perf_counter()
    pace = run.measure_tokens_per_second(settings_of())
    assert pace > 3 * 64 / (time.perf_counter() - began)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "need, warning",
    [
        (79, ""),
        (95, "warning    the training can run out of memory: each GPU has only 80.0 GB: lower"),
        (110, None),
    ],
)
def test_a_gpu_that_is_too_small_is_reported_at_the_start(monkeypatch, need, warning):
    """If the estimated memory of a step is close to the memory of the GPU, a warning is printed. If the estimate is
    more than 20 % above the memory of the GPU, an error is raised."""
    monkeypatch.setattr("mamba_fsdp.trainer.setup.local_machine", lambda: Instance("H100", 8, 80.0))
    world = World(0, 8, 8, torch.device("cuda", 0))
    printed = []
    memory = {"weights": 10**9, "activations": (need - 1) * 10**9}
    if warning is None:
        with pytest.raises(
            UserError, match="needs about 110.0 GB .* has only 80.0 GB: lower batch"
        ):
            check_memory(memory, world, printed.append)
    else:
        check_memory(memory, world, printed.append)
        assert "".join(printed).startswith(warning) and len(printed) == bool(warning)


@pytest.mark.parametrize(
    "error, is_translated",
    [
        (torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 MiB"), True),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
    ],
)
def test_too_little_memory_before_the_first_step_has_a_remedy(error, is_translated):
    """An error about too little memory before the first step contains a remedy. After the first step, the error is not
    changed, because it can be transient, and a restart can help."""
    found = run.translate_error(error, rank=3, has_stepped=False)
    assert isinstance(found, UserError) == is_translated
    assert is_translated == bool(
        re.match("rank 3 has too little memory: .* `mamba-fsdp plan`", str(found))
    )
    assert run.translate_error(error, rank=3, has_stepped=True) is error
