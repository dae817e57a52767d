"""consolidated.00.pth is what torch.save writes, made with one tensor in memory at a time."""

import os
import weakref

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


def test_it_is_what_torch_saves(tmp_path):
    """Byte for byte; what is tied is one tensor. Nothing else is left in the folder."""
    folder = tmp_path / "folder"
    folder.mkdir()
    write_pth(folder / "file.pth", list(TENSORS), TENSORS.values(), {"tied": "matrix"})
    with open(tmp_path / "file.pth", "wb") as file:
        torch.save({**TENSORS, "tied": TENSORS["matrix"]}, file)
    assert (folder / "file.pth").read_bytes() == (tmp_path / "file.pth").read_bytes()
    assert os.listdir(folder) == ["file.pth"]
    content = torch.load(folder / "file.pth", weights_only=True)
    assert content["tied"] is content["matrix"]


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
        yield torch.ones(3)
        raise UserError("the source is broken")

    with pytest.raises(UserError, match="the source is broken"):
        write_pth(tmp_path / "file", ["a", "b"], tensors(), {})
