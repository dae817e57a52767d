"""Tests that checkpoints scale to thousands of ranks: the system calls of rank 0, the bytes that it receives and sends,
and the number of open files."""

import os
import resource

import pytest
import torch

from benchmarks.checkpoint_scale import measure
from mamba_fsdp.checkpoint.contents import Contents, StoredTensor
from mamba_fsdp.checkpoint.files import write_pieces
from mamba_fsdp.checkpoint.folder import Reader
from mamba_fsdp.checkpoint.ranges import TensorRanges
from mamba_fsdp.model.config import ModelConfig
from mamba_fsdp.parallel.world import start_world
from tests.support.ranks import run_ranks


@pytest.mark.slow
def test_the_system_calls_of_rank_0_do_not_depend_on_the_number_of_ranks():
    """The number of system calls of rank 0 does not depend on the number of ranks, and the number of bytes that rank 0
    receives, writes and sends grows at most linearly with the number of ranks."""
    few, many = (measure(ModelConfig(d_model=64, n_layer=2), ranks) for ranks in (64, 1024))
    for calls in ("save_calls", "start_calls"):
        assert 0 < few[calls] == many[calls] < 25
    for what in ("told_bytes", "state_bytes", "commit_bytes", "sent_bytes"):
        assert many[what] < 1.5 * 1024 / 64 * few[what], what


def read_with_few_files(_, folder, contents):
    """Reads a tensor twice from a checkpoint with more files than this process can open.

    Returns (how much start_world has raised the soft limit of open files above those in use, the tensors).
    """
    highest = max(map(int, os.listdir("/proc/self/fd")))
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 4, highest + 30))
    start_world()
    reader = Reader(folder, contents)
    read = [reader.read("model/a", 0, 120) for _ in range(2)]
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0] - highest, read


def test_a_checkpoint_may_have_more_files_than_a_process_may_open(tmp_path):
    whole = torch.arange(120.0)
    files = [str(number) for number in range(40)]
    for name, part in zip(files, whole.split(3)):
        write_pieces(tmp_path / name, [("model/a", 3 * int(name), part)])
    cut = TensorRanges(list(range(0, 120, 3)), list(range(40)))
    contents = Contents(1, {}, files, [cut], {"model/a": StoredTensor([120], "F32", 0)})
    ((soft, read),) = run_ranks(1, read_with_few_files, tmp_path, contents, launched=False)
    assert soft == 30 and all(torch.equal(tensor, whole) for tensor in read)
