"""Preflight: every failure is found, names its node and a remedy."""

import json
import shutil

import pytest
import torch

from config import resolve
from config.model_config import ModelConfig
from mamba_fsdp import command_line
from mamba_fsdp.errors import UserError
from mamba_fsdp.launch import machine
from mamba_fsdp.model.init import initial_value
from mamba_fsdp.model.spec import parameters
from mamba_fsdp.verbs import preflight
from mamba_fsdp.verbs.preflight import main


@pytest.fixture
def folder(tmp_path):
    """A run folder's preflight folder, as the launcher makes it."""
    (tmp_path / "run/preflight").mkdir(parents=True)
    (tmp_path / "run/preflight/token").touch()
    (tmp_path / "store").mkdir()
    return tmp_path / "run/preflight"


@pytest.fixture
def report(folder, tmp_path, monkeypatch):
    """report(node, **settings): as that node would."""
    monkeypatch.setattr(preflight, "check_version", lambda: None)
    monkeypatch.setattr(
        shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**12, 0, 10**12)
    )
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def report_as(node, gpus=0, efa=0, **given):
        monkeypatch.setenv("SLURMD_NODENAME", node)
        monkeypatch.setenv("EFA_COUNT", str(efa))
        monkeypatch.setattr(preflight, "assigned_gpus", lambda: gpus)
        monkeypatch.setattr(preflight, "driver_gpus", lambda: ["NVIDIA A100"] * gpus)
        words = {"save_ckpt_path": folder.parent, "dataset_path": tmp_path / "store", **given}
        preflight.report(
            folder, resolve.resolve_settings({name: str(value) for name, value in words.items()})[0]
        )

    return report_as


def test_equal_nodes_are_fit(folder, report, capsys, monkeypatch):
    monkeypatch.setattr(machine, "find_library", lambda name: f"lib{name}.so")
    for node in ("a", "b"):
        report(node, gpus=8, efa=32)
    assert preflight.judge(folder, ["a", "b"]) == 0
    assert capsys.readouterr().out == (
        "node 0     a: 8 GPUs NVIDIA A100, 32 EFA devices\n"
        "node 1     b: 8 GPUs NVIDIA A100, 32 EFA devices\n"
    )


def test_a_node_that_does_not_answer(folder, report, capsys):
    report("a")
    assert preflight.judge(folder, ["a", "b"]) == 1
    assert "error: b: no answer" in (said := capsys.readouterr().err) and "--exclude=b" in said


def test_no_node_answers(folder, capsys):
    assert preflight.judge(folder, ["a", "b"]) == 1
    assert capsys.readouterr().err.count("no answer") == 2


@pytest.mark.parametrize(
    "other, said",
    [
        ({"gpus": 4, "efa": 4}, "error: b: it has 4 GPUs"),
        ({"gpus": 8, "efa": 3}, "error: b: it has 3 EFA"),
    ],
)
def test_nodes_that_differ(folder, report, capsys, other, said):
    report("a", gpus=8, efa=4)
    report("b", **other)
    assert preflight.judge(folder, ["a", "b"]) == 1
    assert said in capsys.readouterr().err


def test_a_gpu_that_the_driver_has_lost(folder, report, capsys, monkeypatch):
    report("a", gpus=2)
    monkeypatch.setattr(preflight, "driver_gpus", lambda: ["NVIDIA A100"])
    monkeypatch.setattr(preflight, "assigned_gpus", lambda: 2)
    assert preflight.troubles_on("b") == [
        "b: Slurm assigned 2 GPUs, but the driver shows 1; look at `nvidia-smi` there and take the node out: "
        "scontrol update nodename=b state=drain reason=gpu"
    ]


@pytest.mark.parametrize(
    "image, said",
    [
        ("/fsx/new.sqsh", "error: the image /fsx/new.sqsh shows no GPU on any node"),
        (None, "error: no node shows a GPU"),
    ],
)
def test_gpus_that_no_node_shows_are_the_images_matter(
    folder, report, capsys, monkeypatch, image, said
):
    """Nobody has to drain all nodes because an image does not ask for NVIDIA's driver."""
    monkeypatch.delenv("IMAGE", raising=False)
    if image:
        monkeypatch.setenv("IMAGE", image)
    for node in ("a", "b"):
        report(node, gpus=8)
        found = json.loads((folder / f"{node}.json").read_text())
        (folder / f"{node}.json").write_text(
            json.dumps({**found, "gpus": [], "troubles": [f"{node}: drain it"]})
        )
    assert preflight.judge(folder, ["a", "b"]) == 2
    told = capsys.readouterr().err
    assert said in told and "drain" not in told and len(told.splitlines()) == 1


@pytest.mark.parametrize("plugin, warned", [(None, True), ("libnccl-net-ofi.so", False)])
def test_efa_devices_without_nccls_plugin_are_a_warning(
    folder, report, capsys, monkeypatch, plugin, warned
):
    monkeypatch.setattr(
        machine, "find_library", lambda name: plugin if f"lib{name}.so" == plugin else None
    )
    report("a", gpus=8, efa=32)
    assert preflight.judge(folder, ["a"]) == 0
    assert ("warning: a: EFA devices, but no libnccl-net.so" in capsys.readouterr().err) == warned


def test_too_little_space_for_the_checkpoints_to_come(folder, report, capsys, monkeypatch):
    """mamba-2.8b: 12 bytes a parameter, three kept and one being written; one less for each that is there."""
    monkeypatch.setattr(
        shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**12, 0, 10**10)
    )
    report("a", model_name="mamba-2.8b", vocab_size=50277)
    assert preflight.judge(folder, ["a"]) == 2
    said = capsys.readouterr().err
    assert (
        "error: a: 10.0 GB free" in said
        and "4 checkpoints to come need 132." in said
        and "keep_checkpoints" in said
    )
    for step in (1, 2, 3):
        (folder.parent / f"checkpoints/step_{step:08d}").mkdir(parents=True)
        (folder.parent / f"checkpoints/step_{step:08d}/COMMIT").touch()
    report("a", model_name="mamba-130m", vocab_size=50277)
    assert preflight.judge(folder, ["a"]) == 0


def test_the_space_is_that_of_the_model_that_init_from_names(
    folder, report, tmp_path, capsys, monkeypatch
):
    """Not that of the default model, which is a small one."""
    config = ModelConfig(d_model=512, n_layer=1, vocab_size=4096)
    initial = {
        name: initial_value(name, parameter, 0) for name, parameter in parameters(config).items()
    }
    (tmp_path / "model").mkdir()
    torch.save(initial, tmp_path / "model/consolidated.00.pth")
    (tmp_path / "model/config.json").write_text(json.dumps(vars(config)))
    monkeypatch.setattr(
        shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**12, 0, 10**8)
    )
    monkeypatch.setenv("SLURMD_NODENAME", "a")
    settings_given = [f"--save_ckpt_path={folder.parent}", f"--dataset_path={tmp_path / 'store'}"]

    def judge(*more):
        command_line.call(main, ["report", str(folder), *settings_given, *more])
        return preflight.judge(folder, ["a"]), capsys.readouterr().err

    monkeypatch.setattr(preflight, "check_version", lambda: None)
    assert judge() == (0, "")
    code, said = judge(f"--init_from={tmp_path / 'model'}")
    assert (
        code == 2
        and "error: a: 0.1 GB free" in said
        and "4 checkpoints to come need 0.2 GB" in said
    )
    code, said = judge(f"--init_from={tmp_path / 'elsewhere'}")
    assert (
        code == 2 and said == f"error: a: {tmp_path}/elsewhere: there is no such file or folder\n"
    )
    code, said = judge(f"--load_ckpt_path={tmp_path / 'elsewhere'}")
    assert code == 2 and said.startswith(
        f"error: a: load_ckpt_path {tmp_path}/elsewhere: there is no such"
    )
    monkeypatch.setattr(
        shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**12, 0, 10**10)
    )
    assert judge(f"--load_ckpt_path={folder.parent}/") == (0, ""), "the run folder"


def test_a_folder_that_is_not_shared(folder, report):
    (folder / "token").unlink()
    said = "^b: .* is not the folder that the first node sees; mount the shared file system on b"
    with pytest.raises(UserError, match=said):
        report("b")


def test_data_that_one_node_does_not_have(folder, report, tmp_path, capsys):
    report("a")
    (tmp_path / "store").rmdir()
    report("b")
    assert preflight.judge(folder, ["a", "b"]) == 2
    assert f"error: b: there is no {tmp_path}/store; mount" in capsys.readouterr().err


def test_data_that_no_node_has_is_to_be_made(folder, report, tmp_path, capsys):
    (tmp_path / "store").rmdir()
    for node in ("a", "b"):
        report(node)
    assert preflight.judge(folder, ["a", "b"]) == 2
    told = capsys.readouterr().err
    assert (
        told.startswith(
            f"error: there is no {tmp_path}/store on any node; make it with get_dataset.py"
        )
        and "2.tokenize.sbatch" in told
        and len(told.splitlines()) == 1
    )


def test_data_that_differs_between_nodes(folder, report, tmp_path, capsys):
    report("a")
    (tmp_path / "store/00000.bin").touch()
    report("b")
    assert preflight.judge(folder, ["a", "b"]) == 2
    assert f"error: b: it has another {tmp_path}/store" in capsys.readouterr().err


@pytest.mark.parametrize(
    "stamp, said",
    [
        (None, "half-made"),
        ("cpu\n", "another requirements/cpu.txt"),
        ("cpu\n0123\n", "another"),
        ("other\n0123\n", "another requirements/other.txt"),
        ("", "another"),
    ],
)
def test_environments_that_do_not_belong_to_the_checkout(tmp_path, stamp, said):
    if stamp is not None:
        (tmp_path / ".complete").write_text(stamp)
    with pytest.raises(UserError, match=said):
        machine.check_version(tmp_path)


@pytest.mark.parametrize(
    "visible, count", [("0,1", 2), ("", 0), ("-1", 0), ("NoDevFiles", 0), ("GPU-8932f937-d72c", 1)]
)
def test_gpus_that_were_chosen_are_counted(monkeypatch, visible, count):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert machine.assigned_gpus() == count


def test_reports_are_whole_json(folder, report):
    report("a", gpus=1)
    assert json.loads((folder / "a.json").read_text())["gpu_count"] == 1
