"""Tests mamba_fsdp.parallel.world: collectives, errors on some ranks, and how ranks connect to each other."""

import time
import weakref
from datetime import timedelta
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist

from mamba_fsdp.conventions import is_torch_2_2
from mamba_fsdp.errors import StorageError, TransientError, UserError
from mamba_fsdp.parallel import world as module
from mamba_fsdp.parallel.world import CPU, EXPECTED_RANKS, peer_lost_error, start_world
from mamba_fsdp.this_process import progress
from tests.support.ports import hold_port
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.torch22


def talk(world):
    world.barrier()
    return (
        world.broadcast_object(f"from {world.rank}"),
        world.gather_on_rank0(world.rank * 10),
        world.all_reduce_sum(world.rank),
        world.all_reduce_sum([1.0, world.rank / 2]),
        world.all_reduce_sum(torch.tensor([world.rank, 1])).tolist(),
        world.start_copy_to_host(world.copy_to_device([world.rank / 2]))(),
        (world.rank, world.size, world.local_size, world.timeout),
        world.gather_unique(["all"] + [f"from {world.rank}"] * (world.rank == 1)),
        world.on_all_ranks(str, world.rank),
    )


@pytest.mark.slow
def test_collectives():
    """Each collective returns its documented result on every rank. gather_on_rank0 returns an empty list on the other
    ranks."""
    for rank, result in enumerate(run_ranks(3, talk)):
        gathered = [0, 10, 20] if rank == 0 else []
        assert result == (
            "from 0",
            gathered,
            3,
            [3.0, 1.5],
            [3, 3],
            [rank / 2],
            (rank, 3, 3, timedelta(minutes=3, seconds=5)),
            ["all", "from 1"],
            str(rank),
        )


def test_one_process_needs_no_launcher(monkeypatch):
    """Without torchrun, start_world returns a world of one rank, whose collectives work without a process group."""
    monkeypatch.delenv("RANK", raising=False)
    world = start_world()
    expected = ([0], 0, [1.0, 0.0], [0, 1], [0.0], (0, 1, 1, None), ["all"], "0")
    assert talk(world)[1:] == expected
    assert not dist.is_initialized()
    world.close()


def start_worlds_again(world):
    """Returns three sums over ranks: one in the given world after close() was called in an exception handler, where it
    has no effect, and one in each of two later worlds."""
    try:
        raise KeyError
    except KeyError:
        world.close()
    sums = [world.all_reduce_sum(world.rank)]
    for _ in range(2):
        world.close()
        # Rank 0 starts late, as it does when it publishes a model after a training.
        time.sleep(0.5 * (world.rank == 0))
        world = start_world(timeout_minutes=0.3)
        sums.append(world.all_reduce_sum(world.rank))
    return sums


def close_and_check_groups(world):
    """Closes the world, and returns whether all its process groups have been freed."""
    world.grid(1)
    groups = [weakref.ref(group) for group in (dist.group.WORLD, *world._groups)]
    world.close()
    return all(group() is None for group in groups)


@pytest.mark.slow
def test_no_thread_of_a_group_outlives_its_world():
    """Closing a world frees its process groups, and thereby ends their threads. Otherwise a thread that frees a tensor
    while the interpreter exits would abort the process. With torch 2.2 the groups are not freed, because this could
    hang."""
    assert run_ranks(2, close_and_check_groups) == [not is_torch_2_2()] * 2


@pytest.mark.slow
def test_processes_can_train_several_times():
    """After a world has been closed, the same processes can start another one. Its ranks do not use the addresses of
    the previous world."""
    assert run_ranks(2, start_worlds_again) == [[1, 1, 1]] * 2


def wait_for_progress(world, folder):
    """Runs work on both ranks until rank 0 has noticed the progress of rank 1. Returns the rank.

    The work of rank 1 makes progress all the time. The work of rank 0 only waits until the progress of rank 1 has
    updated `progress.last` on rank 0.
    """
    before, noticed = progress.last, folder / "noticed"

    def work():
        while not noticed.exists():
            time.sleep(0.01)
            if world.rank == 1:
                progress.touch()
            elif progress.last > before:
                noticed.touch()
        return world.rank

    return world.run_local(work)


@pytest.mark.slow
def test_waiting_for_a_rank_that_makes_progress_counts_as_progress(tmp_path):
    assert run_ranks(2, wait_for_progress, tmp_path) == [0, 1]


def fail_on_one(world, method):
    def work():
        if world.rank == 1:
            raise StorageError("mine alone")
        return "done"

    try:
        return getattr(world, method)(work)
    except UserError as error:
        return f"{type(error).__name__}: {error}"


@pytest.mark.slow
@pytest.mark.parametrize(
    "method, results",
    [
        ("run_local", ["done", "StorageError: mine alone"]),
        ("on_all_ranks", ["StorageError: mine alone"] * 2),
    ],
)
def test_an_error_on_one_rank_is_raised_there_or_on_all_ranks(method, results):
    assert run_ranks(2, fail_on_one, method) == results


def fail_first(world):
    errors = []
    for error in (
        UserError("a mistake"),
        OSError(28, "disk full", "FILE"),
        ValueError("a surprise"),
        StorageError("gone"),
        OSError(5, "unwell", "FILE"),
        OSError("in other words"),
    ):

        def action(error=error):
            raise error

        try:
            world.on_rank0(action)
        except UserError as failure:
            errors.append((failure.exit_code, str(failure)))
    return world.on_rank0(lambda: world.rank), errors


@pytest.mark.slow
def test_results_and_errors_of_rank0_reach_all_ranks():
    expected = (
        0,
        [
            (2, "a mistake"),
            (2, "FILE: disk full"),
            (2, "ValueError: a surprise"),
            (74, "gone"),
            (74, "FILE: unwell"),
            (2, "in other words"),
        ],
    )
    assert run_ranks(2, fail_first) == [expected, expected]


def test_incomplete_environment_variables_are_an_error(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(UserError, match="WORLD_SIZE.*torchrun"):
        start_world()


def test_leftover_variables_of_another_launcher_are_named(monkeypatch, capfd):
    """If the variables of a launcher are set but the other ranks do not start, a rank prints how many ranks it waits
    for, and fails after a timeout. The error lists the variables to unset."""
    names = {"RANK": 0, "WORLD_SIZE": 2, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 2}
    held = hold_port()
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": held.getsockname()[1]}
    for name, value in {**names, **place}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr(module, "RENDEZVOUS_TIMEOUT", timedelta(seconds=1))
    with pytest.raises(UserError, match=f"can't connect 2 ranks at .*: unset {' '.join(names)}$"):
        start_world()
    assert "waiting    for 2 ranks at 127.0.0.1:" in capfd.readouterr().err
    held.close()


def test_missing_ranks_are_an_error(monkeypatch):
    """If fewer ranks have started than expected, start_world raises an error. torchrun leaves out a node if its clock
    is late, and the other ranks would train with a smaller batch."""
    names = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    for name, value in {**names, EXPECTED_RANKS: "2"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(TransientError, match="^only 1 of 2 ranks have started; .* clock"):
        start_world()


RANK_2 = {"RANK": "2", "LOCAL_RANK": "2", "WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "3"}
TOO_OLD = "can't open the GPUs that the driver shows: too old"


@pytest.mark.parametrize(
    "opened, driver, environment, expected",
    [
        (2, 2, {}, torch.device("cuda", 0)),
        (2, 2, RANK_2, "process 2 of this node has no GPU: the node has only 2"),
        (0, 0, {}, CPU),
        (0, 1, {}, TOO_OLD),
        (0, 0, {"CUDA_VISIBLE_DEVICES": "MIG-1"}, TOO_OLD),
    ],
)
def test_each_process_uses_its_gpu(monkeypatch, opened, driver, environment, expected):
    """Each process uses the GPU of its local rank, or the CPU if the node has no GPU. It is an error if the node has
    too few GPUs, or if it has GPUs that can't be opened."""
    monkeypatch.delenv("RANK", raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    cuda = Mock(**{"init.side_effect": RuntimeError("too old")})
    cuda.is_available.return_value = opened > 0
    cuda.device_count.return_value = opened
    cuda._device_count_nvml.return_value = driver
    names = "is_available device_count _device_count_nvml init set_device"
    for name in names.split():
        monkeypatch.setattr(torch.cuda, name, getattr(cuda, name))
    if isinstance(expected, str):
        with pytest.raises((TransientError, UserError), match=expected):
            start_world()
    else:
        world = start_world()
        assert world.device == expected and cuda.set_device.called == (opened > 0)


@pytest.mark.parametrize(
    "error, is_loss",
    [
        (RuntimeError("[gloo/transport/tcp/pair.cc:534] Connection closed by peer [::1]:1"), True),
        (dist.DistBackendError("[1] is setting up NCCL: remote process exited"), True),
        (dist.DistBackendError("NCCL error: invalid usage"), False),
        (RuntimeError("Connection closed by peer"), False),
    ],
)
def test_only_errors_of_communication_are_lost_ranks(error, is_loss):
    found = peer_lost_error(error, 3)
    assert (found is not None) == is_loss
    if is_loss:
        assert str(found).startswith("rank 3 lost another rank") and "[1]" not in str(found)
