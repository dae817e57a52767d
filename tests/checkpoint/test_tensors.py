import tarfile
import zipfile

import pytest
import torch

from mamba_fsdp.checkpoint.tensors import CheckpointTensors
from mamba_fsdp.errors import UserError
from mamba_fsdp.interop import pth_files
from mamba_fsdp.interop.pth_files import PthTensors
from mamba_fsdp.parallel.model import fill_parts
from mamba_fsdp.parallel.world import start_world
from tests.support.checkpoints import as_whole, open_run
from tests.support.ranks import build, value_of

pytestmark = pytest.mark.torch22


@pytest.fixture
def saved(run, monkeypatch):
    """(a model, a checkpoint of it, the model as a .pth file)."""
    monkeypatch.delenv("RANK", raising=False)
    world = start_world()
    parallel, optimizer = build(world, strategy="none")
    checkpointer = open_run(run, world, asynchronous=False)
    checkpointer.save(1, parallel.shards(optimizer), {})
    file = run / "model.pth"
    torch.save(
        {name: tensor.detach() for name, tensor in parallel.model.state_dict().items()}, file
    )
    return parallel, checkpointer.last, file


def compressed(file):
    """The .pth file with its entries compressed, as other programs may pack it: mapped, that would not be numbers."""
    packed = file.with_name("compressed.pth")
    with zipfile.ZipFile(file) as stored, zipfile.ZipFile(packed, "w") as archive:
        for name in stored.namelist():
            archive.writestr(name, stored.read(name), zipfile.ZIP_DEFLATED)
    return packed


@pytest.mark.parametrize("kind", ["folder", "file", "compressed"])
def test_each_form_gives_the_model_back(saved, kind):
    """Every parameter by name, tied ones by each of their names, whole or sliced; the optimiser is not among them."""
    parallel, folder, file = saved
    if kind == "folder":
        tensors = CheckpointTensors(as_whole(folder))
    else:
        tensors = PthTensors(compressed(file) if kind == "compressed" else file)
    for name, parameter in parallel.parameters().items():
        assert torch.equal(tensors.get(name), parameter)
        assert torch.equal(tensors.slice(name, 3, 9), parameter.detach().flatten()[3:9])
    assert not [name for name in tensors.shapes if "exp_avg" in name]
    fill_parts(parallel.shards(), lambda name, start, stop: tensors.slice(name, start, stop) + 1)
    name = "backbone.norm_f.weight"
    assert torch.equal(parallel.parameters()[name], value_of(name, (24,)) + 1)


def test_a_small_archive_that_unpacks_to_gigabytes_is_refused_unopened(tmp_path, monkeypatch):
    """By the sizes that it declares."""
    monkeypatch.setattr(pth_files, "HARMLESS", 10**6)
    torch.save({"weight": torch.zeros(10**6)}, tmp_path / "zeros.pth")
    with pytest.raises(UserError, match=r"pth \(.* bytes\) says that it holds 4,0.*, more than"):
        PthTensors(compressed(tmp_path / "zeros.pth"))


@pytest.mark.parametrize(
    "tensor",
    [
        torch.eye(2).to_sparse(),
        torch.ones(2, device="meta"),
        *(torch.ones(2).to(dtype) for dtype in (torch.complex64, torch.int64, torch.bool)),
    ],
    ids=lambda tensor: f"{tensor.layout} {tensor.dtype}",
)
def test_what_is_no_weight_is_told_in_a_line(tmp_path, tensor):
    torch.save({"weight": tensor}, tmp_path / "file.pth")
    with pytest.raises(UserError, match="file.pth: weight is .* weights are dense"):
        PthTensors(tmp_path / "file.pth").get("weight")


def test_a_bomb_of_shared_dicts_is_visited_once_and_a_repeated_number_is_no_tensor(tmp_path):
    """2 ** 45 ways lead to the one tensor; one number stands for 2 ** 40."""
    content = {"weight": torch.ones(2)}
    for _ in range(45):
        content = {"a": content, "b": content}
    torch.save(content, tmp_path / "bomb.pth")
    (name,) = PthTensors(tmp_path / "bomb.pth").shapes
    assert name == "a." * 45 + "weight"
    torch.save({"weight": torch.ones(1).expand(2**20, 2**20)}, tmp_path / "large.pth")
    with pytest.raises(
        UserError, match="large.pth: weight should have .* elements, .* holds fewer"
    ):
        PthTensors(tmp_path / "large.pth")


def test_what_is_no_dict_of_tensors_is_refused(tmp_path):
    """What would execute code, or is cut short, is refused by who reads a model: tests/interop/test_refusals.py."""
    bad = tmp_path / "bad.pth"
    for content in ([1], {"a": 1}):
        torch.save(content, bad)
        with pytest.raises(UserError, match="bad.pth is not a dict of tensors"):
            PthTensors(bad)
    with pytest.raises(UserError, match="can't read .*missing.pth"):
        PthTensors(tmp_path / "missing.pth")


def test_archives_that_may_hold_programs_are_refused_unopened(tmp_path, monkeypatch):
    """torch before 2.6 hands a TorchScript archive to torch.jit.load even with weights_only."""

    class Doubled(torch.nn.Module):
        def forward(self, x):
            return 2 * x

    torch.jit.trace(Doubled(), torch.ones(1)).save(tmp_path / "script.pth")
    with tarfile.open(tmp_path / "tar.pth", "w") as archive:
        archive.add(__file__, "storages")
    monkeypatch.setattr(torch.jit, "load", lambda *_, **__: pytest.fail("a program was loaded"))
    for kind in ("script", "tar"):
        with pytest.raises(UserError, match=f"{kind}.pth is a .* archive, which may hold code"):
            PthTensors(tmp_path / f"{kind}.pth")
