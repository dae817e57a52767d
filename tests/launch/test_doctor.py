"""Tests the checks of the doctor (mamba_fsdp.launch.checks): each kind of incomplete environment is reported."""

import ctypes
import sys
from types import SimpleNamespace

import pytest
import torch

from mamba_fsdp.errors import UserError, command, python
from mamba_fsdp.launch import checks, machine
from mamba_fsdp.launch.checks import Check, Finding
from mamba_fsdp.verbs import preflight

pytestmark = pytest.mark.torch22


def test_a_package_that_cannot_be_imported_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    found = Check("packages", checks.find_packages).run()
    assert found.verdict == "FAIL" and "ModuleNotFoundError: import of datasets" in found.text


def test_efa_devices_are_known_by_their_driver(tmp_path, monkeypatch):
    for number, driver in enumerate(["efa", "efa", "mlx5_core"]):
        (tmp_path / f"{number}/device").mkdir(parents=True)
        (tmp_path / f"{number}/device/driver").symlink_to(f"/nowhere/{driver}")
    monkeypatch.setattr(checks, "EFA_FOLDER", tmp_path)
    assert checks.find_efa() == "2 EFA devices"
    monkeypatch.setattr(checks, "EFA_FOLDER", tmp_path / "nowhere")
    assert Check("EFA", checks.find_efa).run() == Finding("-", "0 EFA devices")


def test_efa_devices_need_a_library_that_nccl_looks_for(monkeypatch):
    find = Check("EFA plugin", checks.find_efa_plugin)
    assert find.run() == Finding("-", "no EFA devices")
    monkeypatch.setattr(checks, "count_efa_devices", lambda: 4)
    monkeypatch.delenv("NCCL_NET_PLUGIN", raising=False)

    def load(name):
        if name != "libnccl-net-ofi.so":
            raise OSError(name)

    monkeypatch.setattr(ctypes, "CDLL", load)
    assert find.run().verdict == "FAIL"
    monkeypatch.setenv("NCCL_NET_PLUGIN", "ofi")
    assert find.run() == Finding("ok", "libnccl-net-ofi.so")


@pytest.mark.parametrize(
    ("assigned", "verdict", "text"),
    [(0, "-", "0 GPUs"), (1, "ok", "1 GPU NVIDIA A100"), (2, "FAIL", "the driver shows 1")],
)
def test_gpus_that_slurm_assigned_must_be_shown_by_the_driver(assigned, verdict, text, monkeypatch):
    monkeypatch.setattr(machine, "list_driver_gpus", lambda: ["NVIDIA A100"])
    monkeypatch.setattr(machine, "count_assigned_gpus", lambda: assigned)
    found = Check("GPUs", checks.find_gpus).run()
    assert found.verdict == verdict and text in found.text


@pytest.mark.parametrize("capability, fits", [((9, 0), True), ((8, 9), True), ((10, 0), False)])
def test_a_gpu_that_torch_has_no_code_for_is_a_mistake(monkeypatch, capability, fits):
    major, minor = capability
    about = SimpleNamespace(name="NVIDIA B200", major=major, minor=minor, total_memory=192 << 30)
    monkeypatch.setattr(machine, "count_assigned_gpus", lambda: 1)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", [about].__getitem__)
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_80", "sm_86", "sm_90a"])
    (check,) = (check for check in preflight.JOB_CHECKS if check.name == "torch's code")
    found = check.run()
    assert check.exit_code == 2 and (found.verdict == "ok") == fits
    assert fits or "was not compiled for NVIDIA B200 (sm_100), only for sm_80" in found.text
    assert checks.find_torch_gpus() == f"192 GiB, sm_{major}{minor}, 2250 TFLOP/s in bf16"


@pytest.mark.parametrize("stamp", [None, "cpu\n0123\n", "other\n0123\n", ""])
def test_environments_that_do_not_belong_to_the_checkout(tmp_path, stamp):
    if stamp is not None:
        (tmp_path / ".complete").write_text(stamp)
    with pytest.raises(UserError, match="incomplete or does not match the requirements"):
        machine.check_version(tmp_path)


def test_an_installed_package_has_no_checkout_to_agree_with(tmp_path, monkeypatch):
    monkeypatch.setattr("mamba_fsdp.errors.PROJECT", tmp_path)
    finding = next(check for check in checks.CHECKS if check.name == "environment").run()
    assert finding.verdict == "ok" and "an installed package" in finding.text
    assert command("tokenize") == "mamba-fsdp tokenize" and python() == "python"


@pytest.mark.parametrize(
    "visible, count", [("0,1", 2), ("", 0), ("-1", 0), ("NoDevFiles", 0), ("GPU-8932f937-d72c", 1)]
)
def test_visible_gpus_are_counted(monkeypatch, visible, count):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert machine.count_assigned_gpus() == count
