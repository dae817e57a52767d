"""The doctor says that an environment is whole only when it is."""

import ctypes
import platform
import re
import sys
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

from mamba_fsdp.errors import Accident, UserError, command, python
from mamba_fsdp.launch import checks, machine
from mamba_fsdp.launch.checks import Check, Finding
from mamba_fsdp.parallel.world import start_world
from mamba_fsdp.verbs import preflight
from tests.support.ports import rank_environment

pytestmark = pytest.mark.torch22


def test_a_package_that_cannot_be_imported_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    found = Check("packages", checks.find_packages).make()
    assert found.verdict == "FAIL" and "ModuleNotFoundError: import of datasets" in found.text


def test_what_is_there_is_named_with_its_version():
    assert checks.find_python().startswith(f"{platform.python_version()}, Linux")
    packages = checks.find_packages().split(", ")
    version = torch.__version__.partition("+")[0]
    assert packages[0].startswith(f"torch {version}") and len(packages) >= 9
    assert re.match("(cpu|cuda:0): .*conv", checks.find_operators())


def test_efa_devices_are_known_by_their_driver(tmp_path, monkeypatch):
    for number, driver in enumerate(["efa", "efa", "mlx5_core"]):
        (tmp_path / f"{number}/device").mkdir(parents=True)
        (tmp_path / f"{number}/device/driver").symlink_to(f"/nowhere/{driver}")
    monkeypatch.setattr(checks, "EFA_FOLDER", tmp_path)
    assert checks.find_efa() == "2 EFA devices"
    monkeypatch.setattr(checks, "EFA_FOLDER", tmp_path / "nowhere")
    assert Check("EFA", checks.find_efa).make() == Finding("-", "0 EFA devices")


def test_efa_devices_need_the_library_that_uses_them(monkeypatch):
    find = Check("EFA plugin", checks.find_efa_plugin)
    assert find.make() == Finding("-", "no EFA devices")
    monkeypatch.setattr(checks, "efa_devices", lambda: 4)
    monkeypatch.delenv("NCCL_NET_PLUGIN", raising=False)
    loadable = []

    def load(name):
        if name not in loadable:
            raise OSError(name)

    monkeypatch.setattr(ctypes, "CDLL", load)
    assert find.make().verdict == "FAIL"
    loadable.append("libnccl-net-ofi.so")
    assert find.make().verdict == "FAIL", "NCCL does not look for it"
    monkeypatch.setenv("NCCL_NET_PLUGIN", "ofi")
    assert find.make() == Finding("ok", "libnccl-net-ofi.so")
    monkeypatch.delenv("NCCL_NET_PLUGIN")
    loadable.append("libnccl-net.so")
    assert find.make() == Finding("ok", "libnccl-net.so")


@pytest.mark.parametrize(
    ("driver", "assigned", "verdicts"),
    [([], 0, "- -"), (["NVIDIA A100"], 1, "ok FAIL"), (["NVIDIA A100"], 2, "FAIL FAIL")],
)
def test_gpus_that_torch_or_slurm_see_differently_fail(driver, assigned, verdicts, monkeypatch):
    monkeypatch.setattr(machine, "driver_gpus", lambda: driver)
    monkeypatch.setattr(machine, "assigned_gpus", lambda: assigned)
    stand_in_driver(monkeypatch, len(driver))
    found = [Check("GPUs", find).make() for find in (checks.find_gpus, checks.find_torch_gpus)]
    assert [each.verdict for each in found] == verdicts.split()


def stand_in_driver(monkeypatch, gpus):
    """The driver's library, with which torch counts GPUs before it opens any."""

    def count(pointer):
        pointer._obj.value = gpus
        return 0

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    library = SimpleNamespace(nvmlInit=lambda: 0, nvmlDeviceGetCount_v2=count)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: library)


TOO_OLD = "The NVIDIA driver on your system is too old (found version 11040). Please update"


@pytest.mark.parametrize("visible", [None, "0", "MIG-7f5"])
def test_gpus_that_torch_cannot_open_are_an_error_with_its_reason(monkeypatch, visible):
    """In a rank, in doctor and in preflight, whose exit code 1 lets another node try."""
    stand_in_driver(monkeypatch, 8)
    monkeypatch.setattr(machine, "driver_gpus", lambda: ["NVIDIA H100"] * 8)
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)

    def refuse():
        raise RuntimeError(f"{TOO_OLD}\nand more")

    monkeypatch.setattr(torch.cuda, "init", refuse)
    with pytest.raises(Accident, match=re.escape(TOO_OLD)) as ended:
        start_world()
    assert ended.value.exit_code == 1 and "\n" not in str(ended.value)
    (check,) = (check for check in checks.CHECKS if check.find is checks.find_torch_gpus)
    assert check in preflight.JOB_CHECKS and check.exit_code == 1
    assert check.make() == Finding("FAIL", str(ended.value))


@pytest.mark.parametrize("capability, fits", [((9, 0), True), ((8, 9), True), ((10, 0), False)])
def test_a_gpu_that_torch_has_no_code_for_is_a_mistake(monkeypatch, capability, fits):
    major, minor = capability
    about = SimpleNamespace(name="NVIDIA B200", major=major, minor=minor, total_memory=192 << 30)
    monkeypatch.setattr(machine, "assigned_gpus", lambda: 1)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: about)
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_80", "sm_86", "sm_90a"])
    (check,) = (check for check in preflight.JOB_CHECKS if check.name == "torch's code")
    found = check.make()
    assert check.exit_code == 2 and (found.verdict == "ok") == fits
    assert fits or "has no code for NVIDIA B200 (sm_100), but for sm_80" in found.text
    gpu = f"192 GiB, sm_{major}{minor}"
    assert checks.find_torch_gpus() == f"{gpu}, 2250 TFLOP/s in bf16"
    about.name = "Tesla T4"
    assert checks.find_torch_gpus() == f"{gpu}, peak rate unknown, so no MFU"


def test_no_visible_device_is_a_wish_for_the_cpu(monkeypatch):
    stand_in_driver(monkeypatch, 8)
    monkeypatch.setattr(machine, "driver_gpus", lambda: ["NVIDIA H100"] * 8)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    monkeypatch.delenv("RANK", raising=False)
    assert start_world().device.type == "cpu"
    assert Check("GPUs", checks.find_torch_gpus).make() == Finding("-", "0 GPUs")


def test_a_process_has_the_gpu_of_its_number(monkeypatch):
    """Or there is none for it."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", Mock())
    monkeypatch.delenv("RANK", raising=False)
    assert start_world().device == torch.device("cuda", 0)
    for name, value in rank_environment(1, 2, 0).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match="process 1 of this node has no GPU: there are 1;"):
        start_world()


@pytest.mark.parametrize("stamp", [None, "cpu\n0123\n", "other\n0123\n", ""])
def test_environments_that_do_not_belong_to_the_checkout(tmp_path, stamp):
    if stamp is not None:
        (tmp_path / ".complete").write_text(stamp)
    with pytest.raises(UserError, match="incomplete or was made from other requirements"):
        machine.check_version(tmp_path)


def test_an_installed_package_has_no_checkout_to_agree_with(tmp_path, monkeypatch):
    monkeypatch.setattr("mamba_fsdp.errors.PROJECT", tmp_path)
    finding = next(check for check in checks.CHECKS if check.name == "environment").make()
    assert finding.verdict == "ok" and "an installed package" in finding.text
    assert command("tokenize") == "mamba-fsdp tokenize" and python() == "python"


@pytest.mark.parametrize(
    "visible, count", [("0,1", 2), ("", 0), ("-1", 0), ("NoDevFiles", 0), ("GPU-8932f937-d72c", 1)]
)
def test_gpus_that_were_chosen_are_counted(monkeypatch, visible, count):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert machine.assigned_gpus() == count
