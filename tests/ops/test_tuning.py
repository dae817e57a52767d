"""Sizes of blocks: from a table by architecture, or timed and kept in a file. No kernel runs here."""

import json

import pytest
import torch

from mamba_fsdp.errors import UserError
from mamba_fsdp.ops import triton

pytestmark = pytest.mark.torch22
TABLES = {
    "sweep": {(8, 0): {"BLOCK": 64, "num_warps": 1}, (9, 0): {"BLOCK": 128, "num_warps": 4}},
    "sums": {(8, 0): {"ROWS": 16, "num_warps": 4}},
}
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def nothing_tuned(monkeypatch):
    monkeypatch.setattr(triton, "tuned", {})
    monkeypatch.setattr(triton, "tables", {})


def launched(device=CPU):
    return {kernel: triton.blocks(kernel, table, device) for kernel, table in TABLES.items()}


def seconds(run):
    """A GPU on which 128 channels on two warps and 16 rows on eight are best, and 64 channels do not fit."""
    sizes = run()
    if sizes["sweep"]["BLOCK"] == 64:
        return float("inf")
    return 1 + (sizes["sweep"]["num_warps"] != 2) + (sizes["sums"]["num_warps"] != 8) / 2


@pytest.mark.parametrize(
    "capability, block", [((8, 0), 64), ((8, 9), 64), ((9, 0), 128), ((12, 0), 128)]
)
def test_the_table_of_the_newest_known_architecture_serves(monkeypatch, capability, block):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert launched(torch.device("cuda"))["sweep"]["BLOCK"] == block
    assert launched()["sweep"]["BLOCK"] == 64  # the interpreter's


def test_the_fastest_sizes_are_used_and_kept(tmp_path, monkeypatch):
    path = tmp_path / "sizes.json"
    triton.tune(launched, path, seconds)
    best = {"sweep": {"BLOCK": 128, "num_warps": 2}, "sums": {"ROWS": 16, "num_warps": 8}}
    assert launched() == best == json.loads(path.read_text())
    monkeypatch.setattr(triton, "tuned", {})
    triton.tune(launched, path, lambda run: pytest.fail("timed although there is a file"))
    assert launched() == best


def test_a_file_of_something_else_is_refused(tmp_path):
    (tmp_path / "sizes.json").write_text("{")
    with pytest.raises(UserError, match="sizes.json: not sizes of kernels in JSON; delete it"):
        triton.tune(launched, tmp_path / "sizes.json", seconds)


def test_the_clock_takes_the_fastest_behind_the_first(monkeypatch):
    ticks = iter([0, 90, 100, 103, 200, 202, 300, 304])  # the first run compiles
    monkeypatch.setattr(triton.time, "perf_counter", lambda: next(ticks))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    assert triton._seconds(lambda: None) == 2
    ticks = iter(range(8))
    assert triton._seconds(lambda: {}["no room"]) == float("inf")
