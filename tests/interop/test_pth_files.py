"""Tests mamba_fsdp.interop.pth_files: reading a .pth file executes no code in it, and writing one needs one tensor in
memory at a time."""

import os
import pickle
import tarfile
import weakref
import zipfile

import numpy as np
import pytest
import torch

from mamba_fsdp.errors import StorageError, UserError
from mamba_fsdp.interop import pth_files
from mamba_fsdp.interop.pth_files import PthTensors, write_pth
from tests.support.disk import Disk

pytestmark = pytest.mark.torch22

TENSORS = {
    "matrix": torch.randn(3, 4),
    "bf16": torch.randn(5).bfloat16(),
    "fp16": torch.randn(2, 1, 2).half(),
    "fp64": torch.randn(7).double(),
    "scalar": torch.tensor(1.5),
}


@pytest.fixture
def path(tmp_path):
    return tmp_path / "file.pth"


def compress(path):
    """Compresses the entries of a .pth file, as some programs do. Such a file can't be mapped into memory."""
    with zipfile.ZipFile(path) as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in entries.items():
            archive.writestr(name, content, zipfile.ZIP_DEFLATED)


def test_written_files_equal_those_of_torch_save(tmp_path, path):
    """write_pth writes the same bytes as torch.save, stores tied weights once, and leaves no other files in the
    folder."""
    folder = tmp_path / "folder"
    folder.mkdir()
    write_pth(folder / "file.pth", list(TENSORS), TENSORS.values, {"tied": "matrix"})
    with open(path, "wb") as file:
        torch.save({**TENSORS, "tied": TENSORS["matrix"]}, file)
    assert (folder / "file.pth").read_bytes() == path.read_bytes()
    assert os.listdir(folder) == ["file.pth"]
    content = torch.load(path, weights_only=True)
    assert content["tied"] is content["matrix"]


@pytest.mark.parametrize("form", ["zip", "compressed", "old"])
def test_every_form_of_file_returns_every_tensor(path, form):
    """PthTensors reads whole tensors and slices from plain, compressed and old files, also from nested dicts."""
    content = {"step": 3, "model": {"state": TENSORS}}
    torch.save(content, path, _use_new_zipfile_serialization=form != "old")
    if form == "compressed":
        compress(path)
    read = PthTensors(path)
    assert read.shapes == {f"model.state.{name}": tensor.shape for name, tensor in TENSORS.items()}
    for name, tensor in TENSORS.items():
        assert torch.equal(read.get(f"model.state.{name}"), tensor)
    assert torch.equal(read.slice("model.state.matrix", 3, 9), TENSORS["matrix"].flatten()[3:9])


def test_one_tensor_is_in_memory_at_a_time(path):
    alive = []

    def tensors():
        for number in range(20):
            array = np.full(3, float(number))
            # The array exists as long as the tensor that shares its memory.
            alive.append(weakref.ref(array))
            assert sum(reference() is not None for reference in alive) <= 2
            yield torch.from_numpy(array)

    write_pth(path, list(map(str, range(20))), tensors, {})
    assert len(alive) == 20


def test_an_error_of_the_source_ends_the_writing(path):
    def tensors():
        yield torch.ones(3)
        raise UserError("the source is broken")

    with pytest.raises(UserError, match="the source is broken"):
        write_pth(path, ["a", "b"], tensors, {})


class Trap:
    """Creates a folder if it is unpickled by an unsafe loader."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path.with_name("executed")),)


def write_script(path):
    torch.jit.script(torch.nn.Identity()).save(path)


def write_tar(path):
    with tarfile.open(path, "w") as archive:
        archive.add(__file__, "storages")


def saved(content, share=1.0):
    def write(path):
        torch.save(content, path)
        os.truncate(path, int(path.stat().st_size * share))

    return write


CUT = "file.pth .* is incomplete or damaged; copy"
PROGRAM = "file.pth is damaged or contains more than tensors and plain values"
ARCHIVE = "file.pth is a TorchScript or tar archive, which can contain code"
NO_DICT = "file.pth is not a dict of tensors"
REFUSED = {  # {case: (function that writes the file, part of the message)}
    "script": (write_script, ARCHIVE),
    "tar": (write_tar, ARCHIVE),
    "trap": (lambda path: torch.save({"a": Trap(path)}, path), PROGRAM),
    "pickled trap": (lambda path: path.write_bytes(pickle.dumps({"a": Trap(path)})), PROGRAM),
    "half a zip": (saved(TENSORS, 0.5), CUT),
    "text": (
        lambda path: path.write_text("some text"),
        "file.pth does not contain weights; give a safetensors file or",
    ),
    "no tensor": (saved({"a": 1}), NO_DICT),
    "missing": (lambda path: None, "can't read .*file.pth: No such file"),
    "repeated number": (
        saved({"weight": torch.ones(1).expand(2**20, 2**20)}),
        "file.pth: weight should have .* elements, .* contains fewer",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_file_with_other_objects_is_refused_and_nothing_is_executed(path, monkeypatch, name):
    """A file that is not a dict of tensors is refused without executing code in it. Versions of torch before 2.6 pass
    a TorchScript archive to torch.jit.load, even with weights_only=True."""
    write, message = REFUSED[name]
    write(path)
    monkeypatch.setattr(torch.jit, "load", lambda *_, **__: pytest.fail("a program was loaded"))
    with pytest.raises(UserError, match=message):
        PthTensors(path)
    assert not path.with_name("executed").exists()


def test_a_storage_error_is_not_reported_as_damage(path, monkeypatch):
    saved(TENSORS)(path)
    Disk(monkeypatch, path.parent).lose("file.pth")
    with pytest.raises(StorageError, match="file.pth: Input/output error"):
        PthTensors(path)


def test_a_file_without_weights_is_an_error_of_one_line(path):
    float8 = torch.ones(2).to(torch.float8_e4m3fn)
    for tensor in (
        float8,
        torch.eye(2).to_sparse(),
        torch.ones(2, device="meta"),
        torch.ones(2).long(),
    ):
        saved({"weight": tensor})(path)
        with pytest.raises(UserError, match="file.pth: weight is .* weights must be dense"):
            PthTensors(path).get("weight")


def test_a_bomb_of_shared_dicts_is_visited_once(path):
    """A dict that occurs several times in a file is read only once. In this file, 2 ** 45 paths lead to a single
    tensor."""
    content = {"weight": torch.ones(2)}
    for _ in range(45):
        content = {"a": content, "b": content}
    torch.save(content, path)
    assert list(PthTensors(path).shapes) == ["a." * 45 + "weight"]


def test_a_small_archive_that_unpacks_to_gigabytes_is_refused_unopened(path, monkeypatch):
    """A compressed file is refused if the sizes that it declares are too large. It is accepted below SAFE_SIZE."""
    torch.save({"weight": torch.zeros(10**6)}, path)
    compress(path)
    assert PthTensors(path).shapes == {"weight": (10**6,)}
    monkeypatch.setattr(pth_files, "SAFE_SIZE", 10**6)
    with pytest.raises(UserError, match=r"pth has .* bytes, but 4,0.* after decompression"):
        PthTensors(path)
