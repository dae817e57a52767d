"""Where a step's time goes; what is said of too little memory."""

import contextlib
import json

import pytest
import torch

from mamba_fsdp.errors import UserError
from mamba_fsdp.parallel.world import World
from mamba_fsdp.planning.devices import Instance
from mamba_fsdp.trainer.profiling import DATA
from mamba_fsdp.trainer.setup import check_memory


@pytest.mark.slow
def test_a_run_says_where_its_time_goes(train, tmp_path):
    printed = train(tmp_path / "run", use_profiler=True, num_steps=8, eval_interval=0)
    assert "profile    3 steps, by time of the device:" in printed and "aten::" in printed
    events = json.loads((tmp_path / "run/profile/rank_0.json").read_text())["traceEvents"]
    assert sum(each["name"] == DATA for each in events) == 3


@pytest.mark.parametrize("need, refused, warned", [(79, False, 0), (95, False, 1), (110, True, 0)])
def test_a_gpu_that_is_too_small_is_told_at_the_start(monkeypatch, need, refused, warned):
    """The formula is within 15 % of what a step takes."""
    machine = Instance("H100", 8, 80.0)
    monkeypatch.setattr("mamba_fsdp.trainer.setup.machine_at_hand", lambda: machine)
    world = World(0, 8, 8, torch.device("cuda", 0))
    said = []
    outcome = pytest.raises(UserError, match="needs at least 110.0 GB .* has 80.0 GB: lower batch")
    with outcome if refused else contextlib.nullcontext():
        check_memory({"weights": 10**9, "activations": (need - 1) * 10**9}, world, said.append)
    assert len(said) == warned


def test_a_machine_without_a_gpu_that_is_too_small_is_warned_of(monkeypatch):
    """Much of it may never be touched, and it may swap: no reason to refuse."""
    machine = Instance("cpu", 1, 25.0)
    monkeypatch.setattr("mamba_fsdp.trainer.setup.machine_at_hand", lambda: machine)
    said = []
    check_memory({"activations": 401 * 10**9}, World(0, 1, 1, torch.device("cpu")), said.append)
    (line,) = said
    assert line.startswith("warning    401.0 GB of the machine's 25.0 GB")
    assert len(line) <= 160, "two lines of a terminal"


@pytest.mark.slow
def test_too_little_memory_on_a_gpu_says_what_helps(train, tmp_path, change_loss, monkeypatch):
    def fail(state, true_loss):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 MiB")

    change_loss(fail)
    with pytest.raises(Exception, match="rank 0 has too little memory: .* `mamba-fsdp plan`"):
        train(tmp_path / "run", eval_interval=0)
