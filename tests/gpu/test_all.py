"""Tests the command benchmarks.gpu on a machine without a GPU. tests/nullgpu runs every part of it."""

import os

import pytest

from benchmarks.gpu import __main__ as everything
from benchmarks.gpu.candidates import CANDIDATES, configured
from benchmarks.gpu.models import settings_of
from benchmarks.gpu.sensors import Sensors
from mamba_fsdp.model.config import ModelConfig
from mamba_fsdp.ops.backends import demands
from mamba_fsdp.ops.scan import triton as scan
from mamba_fsdp.ops.ssd import triton as ssd
from mamba_fsdp.settings.train_config import TrainConfig


@pytest.mark.slow
def test_a_part_that_hangs_or_fails_is_reported(tmp_path, monkeypatch):
    monkeypatch.setitem(everything.LIMITS, "warm", 0.1)
    assert everything.run_part("warm", tmp_path, True) == "stopped after 0.1 s"
    monkeypatch.setitem(everything.LIMITS, "no-preset", 60)
    outcome = everything.run_part("no-preset", tmp_path, False)
    assert outcome == "ended with 1, see no-preset.log"
    assert "Traceback" in (tmp_path / "no-preset.log").read_text()


def test_a_machine_without_the_tools_runs_the_other_parts(tmp_path, monkeypatch):
    """Without ncu, compute-sanitizer and git, benchmarks.gpu lists the missing tools in its summary. The summary also
    contains the table of a part, and is the only file that remains."""
    monkeypatch.setattr(everything.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(everything.torch.cuda, "get_device_name", lambda: "a GPU")
    monkeypatch.setattr(everything.torch.version, "cuda", "13.0")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("sys.argv", ["gpu", "--only=ncu,sanitizer", f"--out={tmp_path / 'out'}"])
    (tmp_path / "out").mkdir()
    (tmp_path / "out/sanitizer.md").write_text("| a row |\n")
    assert everything.main() == 1
    (summary,) = (tmp_path / "out").iterdir()
    text = summary.read_text()
    assert text.startswith("a GPU; torch") and "commit not known here" in text
    assert "## ncu: there is no ncu\n" in text
    assert "## sanitizer: there is no compute-sanitizer\n\n| a row |\n" in text


def test_a_tool_finds_the_kernels_compiled(tmp_path, monkeypatch):
    """A part runs once without its tool before it runs under the tool."""
    tool = tmp_path / "compute-sanitizer"
    tool.write_text('#!/bin/sh\ntest -s "$OUT/sanitizer.log" && echo under the tool\n')
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("OUT", str(tmp_path))
    monkeypatch.setattr(everything.sys, "executable", "/bin/echo")
    assert everything.run_part("sanitizer", tmp_path, False) == "done"
    first, second = (tmp_path / "sanitizer.log").read_text().splitlines()
    assert first.startswith("-m benchmarks.gpu") and second == "under the tool"


def test_sensors_are_read_while_the_block_runs(tmp_path, monkeypatch):
    """Sensors.medians uses only the last seconds of the block. Without nvidia-smi, it returns an empty text."""
    monkeypatch.setenv("PATH", str(tmp_path))
    with Sensors() as nothing:
        pass
    assert nothing.medians(9) == ""
    lines = ["345 MHz, 90.00 W, 30"] + ["1755 MHz, 690.00 W, 71"] * 3
    (tmp_path / "nvidia-smi").write_text(
        "#!/bin/sh\n" + "".join(f"echo '{line}'\n" for line in lines)
    )
    (tmp_path / "nvidia-smi").chmod(0o755)
    with Sensors() as sensors:
        sensors.process.wait()
    assert sensors.medians(3) == "1755 MHz, 690.00 W, 71"
    assert sensors.medians(1e3) == "1755 MHz, 690.00 W, 71"


def test_a_candidate_replaces_constants_and_backends_while_it_is_measured():
    before = ssd.SWEEP
    settings = TrainConfig(ModelConfig(layers="mamba2"))
    text = "ssd.triton.SWEEP.P=16 scan.triton.CHUNK=32 norm=reference"
    with configured(settings, text) as changed:
        assert {options["P"] for options in ssd.SWEEP.values()} == {16}
        assert scan.CHUNK == 32
        assert changed.training.kernels == "norm=reference"
    assert ssd.SWEEP is before and scan.CHUNK == 64


@pytest.mark.parametrize("name", CANDIDATES)
def test_the_candidates_name_existing_constants_and_backends(name):
    for candidate in CANDIDATES[name]:
        with configured(settings_of(name, rehearse=True), candidate) as changed:
            demands(changed.training.kernels)


def test_each_call_ends_within_nine_minutes():
    """The limits of the parts of each call leave half a minute of the nine minutes. Each part belongs to exactly one
    call."""
    parts = [name for names in everything.CALLS.values() for name in names]
    assert sorted(parts) == sorted(everything.LIMITS)
    for names in everything.CALLS.values():
        assert sum(map(everything.LIMITS.get, names)) <= 510
