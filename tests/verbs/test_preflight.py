"""Tests the verb `preflight`: it finds every problem, and its message names the node and a remedy."""

import json
import shutil
from unittest.mock import ANY

import pytest

from mamba_fsdp import command_line
from mamba_fsdp.checkpoint.saved_run import TrainState
from mamba_fsdp.errors import PROJECT, UserError
from mamba_fsdp.launch import checks, machine
from mamba_fsdp.run.names import VERDICT
from mamba_fsdp.settings.resolve import as_json_object
from mamba_fsdp.verbs import preflight
from tests.support.checkpoints import commit_empty, open_run, saved_state, shards_of
from tests.support.corpora import write_store
from tests.support.tiny import resolved

GPU = "NVIDIA A100"


@pytest.fixture
def folder(tmp_path):
    """Makes the folder `preflight` of a run folder, like the launcher, and a token store."""
    (tmp_path / "run/preflight").mkdir(parents=True)
    write_store(tmp_path / "store", [range(1, 60)] * 99, vocab_size=64, eos=0, tokenizer="none")
    return tmp_path / "run/preflight"


def give_space(monkeypatch, free):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(free, 0, free))


@pytest.fixture
def report(folder, tmp_path, monkeypatch):
    """Returns a function report(node, **settings) that writes the report of a node. The node's driver shows `shown` of
    its GPUs."""
    monkeypatch.setattr(machine, "check_version", lambda: None)
    give_space(monkeypatch, 10**12)

    def report_as(node, gpus=0, efa=0, shown=None, **given):
        shown = gpus if shown is None else shown
        monkeypatch.setenv("SLURMD_NODENAME", node)
        monkeypatch.setattr(checks, "count_efa_devices", lambda: efa)
        monkeypatch.setattr(machine, "count_assigned_gpus", lambda: gpus)
        monkeypatch.setattr(machine, "list_driver_gpus", lambda: [GPU] * shown)
        usual = {"save_ckpt_path": folder.parent, "dataset_path": tmp_path / "store"}
        file = folder.parent / ".settings"
        file.write_text(json.dumps(as_json_object(resolved(**{**usual, **given}))))
        command_line.call(preflight.main, ["report", str(folder), str(file)])

    return report_as


@pytest.fixture
def judge(folder, capsys):
    """Returns a function judge(*nodes) that returns (exit code, output, problems)."""

    def run(*nodes):
        code = command_line.call(preflight.main, ["judge", str(folder), *nodes])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def test_equal_nodes_are_fit(report, judge, monkeypatch):
    """Equal nodes pass. EFA devices without NCCL's plugin only cause a warning."""
    monkeypatch.setattr(machine, "find_efa_library", lambda: None)
    for node in ("a", "b"):
        report(node, gpus=8, efa=32)
    lines = [
        "node 0     a: 8 GPUs NVIDIA A100, 32 EFA devices\n",
        "node 1     b: 8 GPUs NVIDIA A100, 32 EFA devices\n",
    ]
    code, output, warnings = judge("a", "b")
    assert (code, output) == (0, "".join(lines))
    assert warnings.startswith(
        "warning: a: there are EFA devices, but NCCL finds no libnccl-net.so"
    )


# {beginning of the message about the second node: the hardware of this node}
LACKING = {
    "error: b: the first node can't read a report": None,
    "error: b: it has 4 GPUs": {"gpus": 4, "efa": 4},
    "error: b: it has 3 EFA": {"gpus": 8, "efa": 3},
    "error: b: Slurm assigned 8 GPUs, but the driver shows 7; run `nvidia-smi` on the node, and drain "
    "it: scontrol update nodename=b state=drain reason=gpu": {"gpus": 8, "efa": 4, "shown": 7},
}


@pytest.mark.parametrize("message", LACKING)
def test_a_node_that_differs_from_the_first_is_named(report, judge, folder, message):
    report("a", gpus=8, efa=4)
    if LACKING[message]:
        report("b", **LACKING[message])
    code, _, wrong = judge("a", "b")
    assert code == 1 and message in wrong
    verdict = json.loads((folder / VERDICT).read_text())
    assert verdict["ranks_per_node"] == 8 and wrong.startswith(
        f"error: b: {verdict['unfit']['b']}\n"
    )


def test_the_first_node_must_equal_the_majority_too(report, judge, folder):
    for node, gpus in (("a", 4), ("b", 8), ("c", 8)):
        report(node, gpus=gpus)
    assert judge("a", "b", "c")[0] == 1
    assert [*json.loads((folder / VERDICT).read_text())["unfit"]] == ["a"]


@pytest.mark.parametrize("content", ['{"code": "another", "mistakes": []}', '{"mistakes": []}'])
def test_a_node_whose_project_folder_is_of_another_version_is_named(folder, report, judge, content):
    """A node whose project folder contains other code is reported. The second case is a version before this check,
    whose reports have no digest of the code."""
    report("a")
    (folder / "b.json").write_text(content)
    code, _, wrong = judge("a", "b")
    assert code == 1 and len(wrong.splitlines()) == 1
    assert f"error: b: its {PROJECT} contains other code than on a; mount the" in wrong


def test_too_little_space_for_future_checkpoints_is_refused(folder, report, judge, monkeypatch):
    """The run folder must have space for future checkpoints. mamba-2.8b needs 12 bytes per parameter in each of four
    checkpoints: three that are kept, and one that is being written.

    If the run already has checkpoints, only the next one must fit. Checkpoints that training would remove first count
    as free space.
    """
    give_space(monkeypatch, 10**10)
    given = {"model_name": "mamba-2.8b", "vocab_size": 50277}
    report("a", **given)
    code, _, wrong = judge("a")
    assert code == 2 and "only 10.0 GB free" in wrong and "keep_checkpoints" in wrong
    assert "the next checkpoints need 4 x 33.2 GB" in wrong
    commit_empty(folder.parent, 1, 2)
    old, newest = sorted(folder.parent.glob("checkpoints/*"))
    for checkpoint, size, kept, expected in (
        (newest, 10**11, False, 2),
        (old, 10**11, False, 0),
        (old, 10**11, True, 2),
    ):
        with open(checkpoint / "part", "wb") as file:
            file.truncate(size)
        if kept:
            (checkpoint / "KEEP").touch()
        report("a", **given)
        assert judge("a")[0] == expected


@pytest.mark.parametrize("setting", ["init_from", "load_ckpt_path"])
def test_missing_weights_are_reported_before_training(folder, report, tmp_path, judge, setting):
    report("a", **{setting: tmp_path / "elsewhere"})
    code, _, wrong = judge("a")
    assert code == 2 and f"{tmp_path}/elsewhere: there is no such" in wrong
    # The run now has its own checkpoint, from which it resumes.
    own = open_run(folder.parent)
    own.save(1, shards_of(1), saved_state(resolved().model, TrainState()))
    own.wait()
    report("a", **{setting: tmp_path / "elsewhere"})
    assert judge("a")[0] == 0


def test_a_run_folder_that_is_not_shared_is_reported(folder, monkeypatch):
    monkeypatch.setenv("SLURMD_NODENAME", "b")
    message = "^b: .* is not the folder that the first node sees; mount the shared file system on b"
    with pytest.raises(UserError, match=message):
        preflight.report(folder, folder.parent / ".settings")


def test_data_must_exist_on_all_nodes(report, judge, tmp_path):
    report("a")
    shutil.rmtree(tmp_path / "store")
    report("b", use_dummy_dataset=True)
    assert judge("a", "b") == (0, ANY, "")
    report("b")
    code, _, wrong = judge("a", "b")
    assert code == 2 and wrong.startswith(f"error: b: there is no {tmp_path}/store; mount")
    assert len(wrong.splitlines()) == 1


def test_the_first_node_reports_data_that_training_cannot_read(
    report, judge, tmp_path, monkeypatch
):
    """Data that training can't read is an error of the first node only, with a remedy that is available to users of the
    image. The data is a save_to_disk folder, like AWS's own dataset_path."""
    (tmp_path / "wikitext/train").mkdir(parents=True)
    (tmp_path / "wikitext/dataset_dict.json").touch()
    monkeypatch.setenv("IMAGE", "/fsx/mamba-train.sqsh")
    for node, number in (("a", "0"), ("b", "1")):
        monkeypatch.setenv("SLURM_NODEID", number)
        report(node, dataset_path=tmp_path / "wikitext")
    code, _, wrong = judge("a", "b")
    assert code == 2 and len(wrong.splitlines()) == 1
    assert wrong.startswith(
        f"error: a: {tmp_path}/wikitext: a folder that the library datasets saved"
    )
    assert wrong.endswith(f"make one from it: sbatch 2.tokenize.sbatch {tmp_path}/wikitext OUT\n")
