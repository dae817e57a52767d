"""The verbs on a run's checkpoints: what there is and whether it is whole; its model as one file, in little memory."""

import os
import re
import shutil
import subprocess
import sys

import pytest
import torch

from mamba_fsdp import command_line, storage
from mamba_fsdp.checkpoint import folder
from mamba_fsdp.checkpoint.checkpointer import Checkpointer
from mamba_fsdp.checkpoint.retention import until_the_end
from mamba_fsdp.interop import convert
from mamba_fsdp.parallel.model import Shard
from mamba_fsdp.parallel.world import World
from mamba_fsdp.report.console import Console
from mamba_fsdp.report.records import read_status
from mamba_fsdp.train.run import finish
from mamba_fsdp.train.run_folder import RunFolder
from mamba_fsdp.verbs import checkpoints, consolidate


@pytest.fixture
def run(used, tmp_path):
    """A run with the checkpoints of steps 2 and 4, and its published model."""
    until_the_end.close()  # what other tests read
    shutil.copytree(
        used / "runs/demo", tmp_path / "run", ignore=shutil.ignore_patterns(".reading*")
    )  # killed ones'
    yield tmp_path / "run"
    until_the_end.close()


@pytest.fixture
def call(capsys):
    """call(verb, *words) -> (exit code, what was said)."""

    def call(verb, *words):
        with pytest.raises(SystemExit) as end:
            command_line.run(verb.main, lambda: "", list(map(str, words)))
        told = capsys.readouterr()
        return end.value.code or 0, told.out + told.err

    return call


def test_the_table_of_a_whole_run(run, call):
    (run / "checkpoints/step_00000002/KEEP").touch()
    (run / "checkpoints/.step_00000006.0123456789ab.partial").mkdir()
    code, said = call(checkpoints, run)
    lines = said.splitlines()
    assert code == 0 and len(lines) == 4 and max(map(len, lines)) < 80
    assert re.fullmatch(
        r" +2 +128  +[\d.]+ kB  20\d\d-\d\d-\d\d \d\d:\d\d  kept; not verified", lines[1]
    )
    assert re.fullmatch(r" +4 +256  +[\d.]+ kB  20\d\d-\d\d-\d\d \d\d:\d\d  not verified", lines[2])
    assert re.fullmatch(r" +6  +0 B  +unfinished", lines[3])
    assert call(checkpoints, run, "--verify")[1].splitlines()[2].endswith("  whole")
    assert call(checkpoints, run / "checkpoints/step_00000004")[1].splitlines()[1] == lines[2]
    assert not list(run.rglob(".reading*"))


@pytest.mark.parametrize(
    "damage, without_reading, words",
    [
        (
            lambda path: os.truncate(path / "rank_00000.safetensors", 50),
            True,
            "rank_00000.safetensors has 50 bytes",
        ),
        (lambda path: (path / "state.json").unlink(), True, "state.json: No such file"),
        (lambda path: (path / "COMMIT").write_text("{"), True, "COMMIT is no list of files"),
        (
            lambda path: (path / "COMMIT").write_text(
                (path / "COMMIT").read_text().replace('"version": ', '"version": 9')
            ),
            True,
            "a newer version",
        ),
        (
            lambda path: (path / "state.json").write_bytes(
                bytes((path / "state.json").stat().st_size)
            ),
            False,
            "the content of state.json has changed",
        ),
    ],
)
def test_broken_ones_are_told_with_the_reason_and_an_exit_code(
    run, call, damage, without_reading, words
):
    damage(run / "checkpoints/step_00000002")
    code, said = call(checkpoints, run, "--verify")
    assert code == 1 and "broken: " in said.splitlines()[1] and words in " ".join(said.split())
    assert said.splitlines()[-1].endswith("  whole") and "Traceback" not in said
    code, said = call(checkpoints, run)
    assert code == 1 and words in " ".join(said.split()) or not without_reading


def test_what_its_run_prunes_meanwhile_is_not_broken(run, call, monkeypatch):
    def pruned_first(*given, _problems=folder.problems):
        shutil.rmtree(run / "checkpoints/step_00000002", ignore_errors=True)
        return _problems(*given)

    monkeypatch.setattr(folder, "problems", pruned_first)
    code, said = call(checkpoints, run, "--verify")
    assert code == 0 and len(said.splitlines()) == 2 and said.endswith("  whole\n")


@pytest.mark.parametrize(
    "words, said",
    [
        ((), "missing a required argument"),
        (("nowhere",), "nowhere: there is no such file or folder"),
        ((".",), "neither"),
        (("nowhere", "--verfy"), "did you mean --verify"),
        (("nowhere", "on", "off", "more"), "too many"),
    ],
)
def test_misuse_of_checkpoints_is_an_error_of_its_own(call, words, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, told = call(checkpoints, *words)
    assert code == 2 and said in told and len(told.splitlines()) <= 2


def test_consolidate_writes_what_a_run_publishes(run, call):
    shutil.move(run / "pth/step_00000004", run / "published")
    code, said = call(consolidate, run)
    assert code == 0 and f"{run}/pth/step_00000004/consolidated.00.pth: " in said
    for path in (run / "published").rglob("*"):
        if path.is_file():
            assert (
                path.read_bytes()
                == (run / "pth/step_00000004" / path.relative_to(run / "published")).read_bytes()
            )
    code, said = call(consolidate, run)
    assert code == 0 and said == f"{run}/pth/step_00000004/consolidated.00.pth is there already\n"
    assert call(consolidate, run, "--step=2")[0] == 0
    both = [
        torch.load(run / f"pth/step_0000000{step}/consolidated.00.pth", weights_only=True)[
            "lm_head.weight"
        ]
        for step in (2, 4)
    ]
    assert both[0].dtype == both[1].dtype == torch.float32 and not torch.equal(*both)
    code, said = call(consolidate, run, "--step=3")
    assert (
        code == 2
        and said == f"error: --step=3: {run} has no checkpoint of that step; it has 2, 4\n"
    )


def test_consolidate_refuses_a_broken_step_and_tells_what_it_passes_over(run, call):
    file = run / "checkpoints/step_00000004/rank_00000.safetensors"
    os.truncate(file, file.stat().st_size - 1)
    code, said = call(consolidate, run, "--step=4")
    assert code == 2 and "step_00000004 is broken" in said
    code, said = call(consolidate, run)
    assert (
        code == 0
        and "step_00000004 is broken and passed over" in said
        and "pth/step_00000002/" in said
    )


def test_consolidate_and_the_end_of_its_run_write_the_same_model_at_once(
    run, call, monkeypatch, capsys
):
    """Whoever comes second leaves it as it is; neither takes the other's unfinished folder for a killed one's."""
    published = run / "pth/step_00000004"
    before = sorted(
        (path.name, path.read_bytes()) for path in published.rglob("*") if path.is_file()
    )
    shutil.rmtree(published)
    real, said = convert.write_model, []

    def second(
        *given, **how
    ):  # the model is written, has only to get its name, when the other one comes
        def late(file, other=os.fsync):
            monkeypatch.setattr(storage.os, "fsync", other)
            said.append(call(consolidate, run))
            other(file)

        monkeypatch.setattr(storage.os, "fsync", late)
        convert.publish(*given, **how)

    folder = RunFolder(run)
    folder.take()
    finish(folder, run / "checkpoints/step_00000004", second, Console(enabled=False))
    folder.lease.give_back()
    assert read_status(run)["status"] == "finished"
    ((code, told),) = said
    assert (
        code == 0
        and "still writes" in told
        and "consolidated.00.pth: " in told
        and "Traceback" not in told
    )
    assert before == sorted(
        (path.name, path.read_bytes()) for path in published.rglob("*") if path.is_file()
    )
    assert sorted(path.name for path in (run / "pth").iterdir()) == ["step_00000004"]
    shutil.rmtree(published)
    monkeypatch.setattr(
        convert,
        "to_our_form",
        lambda *given, **how: (real(*given, format="ours"), real(*given, format="ours", **how)),
    )
    code, told = call(consolidate, run)
    assert code == 0 and told.startswith(f"{published / 'consolidated.00.pth'}: ")


WITH_PEAK = """
import pathlib, sys, threading
from mamba_fsdp.verbs import consolidate
import mamba_fsdp.interop.convert, mamba_fsdp.checkpoint.folder
if sys.argv[2] == "slow":
    from mamba_fsdp.interop import pth_files
    real = pth_files._add
    pth_files._add = lambda *given: (real(*given), print("one", flush=True), threading.Event().wait(0.2))

def peak():
    return int(pathlib.Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) // 1024

pathlib.Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
before = peak()
consolidate.main(sys.argv[1])
print("MiB", peak() - before)
"""


def start(run, project, how):
    return subprocess.Popen(
        [sys.executable, "-c", WITH_PEAK, run, how],
        cwd=project,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


@pytest.fixture
def large(run):
    """The run with another checkpoint, of a model of 260 MB in tensors of at most 18 MB."""
    from config.model_config import ModelConfig
    from mamba_fsdp.checkpoint.folder import Reader
    from mamba_fsdp.model.spec import parameters

    model = ModelConfig(d_model=512, n_layer=36, vocab_size=8192, d_state=16)
    state = Reader(run / "checkpoints/step_00000004").state
    state["settings"]["model"] = vars(model)
    checkpointer = Checkpointer(run, World.alone(), report=lambda text: None)
    shards = [
        Shard(name, parameter.shape, 0, torch.zeros(torch.Size(parameter.shape).numel()))
        for name, parameter in parameters(model).items()
    ]
    checkpointer.save(8, shards, state)
    checkpointer.wait()
    return run


@pytest.mark.slow
def test_consolidate_takes_the_memory_of_a_tensor_and_survives_a_kill(large, project):
    """260 MB in less than 100; where it is killed nothing half-written is visible, and the next attempt wins."""
    process = start(large, project, "slow")
    for _ in range(3):
        assert process.stdout.readline() == "one\n", process.stderr.read()
    process.kill()
    process.wait()
    assert sorted(path.name for path in (large / "pth").glob("[!.]*")) == ["step_00000004"]
    process = start(large, project, "fast")
    said, errors = process.communicate()
    size = (large / "pth/step_00000008/consolidated.00.pth").stat().st_size
    assert process.returncode == 0 and size > 250e6, errors
    assert "cleaned" in errors and not list((large / "pth").glob(".*"))
    assert int(re.search(r"MiB (\d+)", said)[1]) < 100
