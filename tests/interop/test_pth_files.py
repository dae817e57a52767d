"""consolidated.00.pth is what torch.save writes, made with one tensor in memory at a time."""

import weakref
import zipfile

import pytest
import torch

from mamba_fsdp.errors import UserError
from mamba_fsdp.interop import convert
from mamba_fsdp.interop.pth_files import write_pth
from tests.support.small_models import CONFIGS, write_ours

pytestmark = pytest.mark.torch22

TENSORS = {
    "matrix": torch.randn(3, 4),
    "bf16": torch.randn(5).bfloat16(),
    "fp16": torch.randn(2, 1, 2).half(),
    "fp64": torch.randn(7).double(),
    "scalar": torch.tensor(1.5),
}


def records(path):
    with zipfile.ZipFile(path) as archive:
        found = {name.partition("/")[2]: archive.read(name) for name in archive.namelist()}
    return {name: data for name, data in found.items() if name[0] != "."}  # these say who wrote it


def test_it_is_what_torch_saves(tmp_path):
    """Record for record, and read by torch, mapped or not; what is tied is one tensor."""
    write_pth(tmp_path / "ours", TENSORS.items(), {"tied": "matrix"})
    torch.save({**TENSORS, "tied": TENSORS["matrix"]}, tmp_path / "theirs")
    ours = records(tmp_path / "ours")
    assert ours == records(tmp_path / "theirs")
    offset = torch._C.PyTorchFileReader(str(tmp_path / "ours")).get_record_offset
    assert not any(offset(name) % 64 for name in ours)
    for mapped in (True, False):
        content = torch.load(str(tmp_path / "ours"), weights_only=True, mmap=mapped)
        assert list(content) == [*TENSORS, "tied"] and content["tied"] is content["matrix"]
        assert all(
            content[name].dtype == tensor.dtype and torch.equal(content[name], tensor)
            for name, tensor in TENSORS.items()
        )


@pytest.mark.parametrize("format", ["pth", "state-spaces"])
def test_one_tensor_is_in_memory_at_a_time(tmp_path, monkeypatch, format):
    ours = write_ours(tmp_path / "ours", CONFIGS["mamba1"])
    alive, most = [], []

    def open_watched(*source, **how):
        weights = open_weights(*source, **how)

        def watched(name, start, stop):
            array = read(name, start, stop).numpy().copy()
            alive.append(weakref.ref(array))  # it lives as long as a tensor over it
            most.append(sum(reference() is not None for reference in alive))
            return torch.from_numpy(array)

        read, weights.tensors.slice = weights.tensors.slice, watched
        return weights

    open_weights = convert.read_weights
    monkeypatch.setattr(convert, "read_weights", open_watched)
    convert.write_model(ours, tmp_path / "out", format=format)
    assert len(most) > 20 and max(most) <= 2


def test_a_source_that_breaks_off_breaks_off_the_writing(tmp_path):
    def tensors():
        yield "a", torch.ones(3)
        raise UserError("the source is broken")

    with pytest.raises(UserError, match="the source is broken"):
        write_pth(tmp_path / "file", tensors(), {})
