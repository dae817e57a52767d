import pytest
from ranks import run_ranks

from mamba_fsdp.errors import UserError
from mamba_fsdp.parallel.world import start_world

pytestmark = pytest.mark.torch22


def talk(world):
    import torch
    world.barrier()
    return (world.broadcast_object(f"from {world.rank}"), world.gather_objects(world.rank * 10),
            world.all_reduce_sum(world.rank), world.all_reduce_sum([1.0, world.rank / 2]),
            world.all_reduce_sum(torch.tensor([world.rank, 1])).tolist(),
            world.any_true(world.rank == 2), world.any_true(False),
            (world.rank, world.size, world.local_rank, world.node_count))


def test_ranks_tell_each_other():
    """Every rank gets rank 0's object, all objects in order, sums, and the or of flags."""
    for rank, result in enumerate(run_ranks(3, talk)):
        assert result == ("from 0", [0, 10, 20], 3, [3.0, 1.5], [3, 3], True, False, (rank, 3, rank, 1))


def test_one_process_needs_no_launcher(monkeypatch):
    """Without torchrun there is a world of one, whose messages are trivial, and no process group."""
    import torch.distributed as dist
    monkeypatch.delenv("RANK", raising=False)
    world = start_world()
    assert talk(world)[1:5] == ([0], 0, [1.0, 0.0], [0, 1])
    assert not dist.is_initialized()
    world.close()


def test_half_an_environment_is_refused(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(UserError, match="WORLD_SIZE.*torchrun"):
        start_world()
