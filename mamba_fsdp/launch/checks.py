"""Checks whether a machine is ready for training.

The verb doctor runs all checks on this machine. The verb preflight runs, on every node of a job,
the checks that have an exit code. Checks import torch only if they need it, so that preflight takes
one second on a node without GPUs.
"""

import importlib
import importlib.util
import platform
import re
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from mamba_fsdp.errors import UserError, first_line, is_checkout
from mamba_fsdp.launch import machine
from mamba_fsdp.text import format_count

PACKAGES = "torch transformers tokenizers datasets numpy safetensors fire PyYAML tensorboard"
OPTIONAL_PACKAGES = ("triton", "causal-conv1d", "mamba-ssm")
MODULE_NAMES = {"PyYAML": "yaml", "causal-conv1d": "causal_conv1d", "mamba-ssm": "mamba_ssm"}
EFA_FOLDER = Path("/sys/class/infiniband")  # where Linux lists EFA devices


class NotPresent(Exception):
    """Raised by a check if its subject, for example a GPU, is not present and not required."""


@dataclass(frozen=True)
class Finding:
    """The result of a check."""

    verdict: str  # "ok", "FAIL", or "-" for something that is neither present nor required
    text: str


@dataclass(frozen=True)
class Check:
    """A named check of the machine.

    `find` returns a description of its findings, or raises NotPresent, a UserError with advice, or
    the error of a failed import.
    """

    name: str
    find: Callable[[], str]
    # The exit code of preflight if the check fails: 2 if only the user can fix it, 1 if it could be
    # transient, 0 if it is only a warning. preflight does not run checks without an exit code.
    exit_code: int | None = None
    if_nodes_differ: str = ""  # advice if nodes differ; "" if they are allowed to differ

    def run(self) -> Finding:
        """Runs the check. Returns its verdict with the description or the error message."""
        try:
            return Finding("ok", self.find())
        except NotPresent as reason:
            return Finding("-", str(reason))
        except UserError as error:
            return Finding("FAIL", str(error))
        except Exception as error:  # an import can raise any exception
            where = traceback.extract_tb(error.__traceback__)[-1]
            text = f"{type(error).__name__}: {first_line(error)} ({where.filename}:{where.lineno})"
            return Finding("FAIL", text)


def find_python() -> str:
    """Returns the versions of Python and of the operating system."""
    return f"{platform.python_version()}, {platform.platform()}"


def find_packages() -> str:
    """Imports the required packages and the optional ones that are installed. Returns their versions."""
    versions = []
    for name in (*PACKAGES.split(), *OPTIONAL_PACKAGES):
        module = MODULE_NAMES.get(name, name)
        if name in OPTIONAL_PACKAGES and importlib.util.find_spec(module) is None:
            continue
        importlib.import_module(module)
        versions.append(f"{name} {metadata.version(name)}")
    return ", ".join(versions)


def find_environment() -> str:
    """Describes the origin of the installed packages. Raises UserError if they do not match
    requirements/.
    """
    machine.check_version()
    if not is_checkout():
        return "an installed package, whose dependencies pip selected"
    return "matches the requirements of this checkout"


def find_gpus() -> str:
    """Returns the number and the names of the GPUs that are assigned to this process.

    Raises UserError if the driver lists fewer GPUs, and NotPresent if no GPU is assigned.
    """
    shown = machine.list_driver_gpus()
    assigned = machine.count_assigned_gpus()
    if assigned > len(shown):
        node = machine.node_name()
        raise UserError(
            f"Slurm assigned {format_count(assigned, 'GPU')}, but the driver shows {len(shown)}; run `nvidia-smi` on the node, and "
            f"drain it: scontrol update nodename={node} state=drain reason=gpu; "
            "if all nodes of a job in an image report this, see docs/image.md"
        )
    if not assigned:
        raise NotPresent("0 GPUs")
    return f"{format_count(assigned, 'GPU')} {', '.join(sorted(set(shown[:assigned])))}"


def find_torch_gpus() -> str:
    """Returns the memory, the architecture and the peak rate of the first GPU.

    Raises UserError if torch can't open the GPU, and NotPresent without a GPU.
    """
    if not machine.count_assigned_gpus():
        raise NotPresent("0 GPUs")
    import torch

    from mamba_fsdp.parallel.world import has_gpus
    from mamba_fsdp.planning.devices import device_peak

    if not has_gpus():
        raise NotPresent("the NVIDIA driver shows no GPU")
    about = torch.cuda.get_device_properties(0)
    peak = device_peak(about.name)
    rate = f"{peak / 1e12:.0f} TFLOP/s in bf16" if peak else "peak rate unknown, so no MFU"
    return f"{about.total_memory / 2**30:.0f} GiB, sm_{about.major}{about.minor}, {rate}"


def find_torch_code() -> str:
    """Returns the GPU architectures that torch was compiled for.

    Raises UserError if the first GPU can't run code for any of them, and NotPresent without a GPU.
    """
    import torch

    if not torch.cuda.is_available():
        raise NotPresent("no GPU")
    # The list contains names such as sm_90, and sm_90a for code with architecture-specific features.
    architectures = torch.cuda.get_arch_list()
    about = torch.cuda.get_device_properties(0)
    numbers = [int(re.sub(r"\D", "", name)) for name in architectures]
    if not any(n // 10 == about.major and n % 10 <= about.minor for n in numbers):
        raise UserError(
            f"torch {torch.__version__} was not compiled for {about.name} (sm_{about.major}{about.minor}), only for "
            f"{', '.join(architectures)}; use the stack that docs/image.md lists for this GPU"
        )
    return ", ".join(architectures)


def count_efa_devices() -> int:
    """Returns the number of network devices that use the EFA driver."""
    drivers = [(path / "device/driver").resolve().name for path in EFA_FOLDER.glob("*")]
    return drivers.count("efa")


def find_efa() -> str:
    """Returns the number of EFA devices. Raises NotPresent if there are none."""
    count = count_efa_devices()
    if not count:
        raise NotPresent("0 EFA devices")
    return f"{count} EFA devices"


def find_efa_plugin() -> str:
    """Returns the name of NCCL's plugin for EFA. Raises UserError if there are EFA devices but no
    plugin, and NotPresent without EFA devices.
    """
    if not count_efa_devices():
        raise NotPresent("no EFA devices")
    plugin = machine.find_efa_library()
    if not plugin:
        raise UserError(
            "there are EFA devices, but NCCL finds no libnccl-net.so (aws-ofi-nccl) and uses TCP instead; build the "
            "image with INSTALL_EFA=1 (docs/image.md), or set NCCL_NET_PLUGIN=ofi if libnccl-net-ofi.so is installed"
        )
    return plugin


def find_operators() -> str:
    """Returns the backend that a run would select for each operator, and why better backends were
    rejected.

    On a GPU, each backend is tested.
    """
    from mamba_fsdp.inference.loading import inference_world
    from mamba_fsdp.model.config import ModelConfig
    from mamba_fsdp.settings.train_config import TrainConfig
    from mamba_fsdp.trainer.kernel_selection import select_for_inference

    settings = TrainConfig(ModelConfig(layers="mamba1,mamba2,attention", d_model=256))
    device = inference_world().device
    return f"{device}: {select_for_inference(settings, device)}"


CHECKS: Sequence[Check] = (
    Check("Python", find_python),
    Check("packages", find_packages),
    Check("environment", find_environment, exit_code=2),
    Check(
        "GPUs",
        find_gpus,
        exit_code=1,
        if_nodes_differ="select nodes of one kind with --partition or --constraint, or exclude the node with "
        "--exclude={node}",
    ),
    Check("torch's GPUs", find_torch_gpus, exit_code=1),
    Check("torch's code", find_torch_code, exit_code=2),
    Check(
        "EFA",
        find_efa,
        exit_code=1,
        if_nodes_differ="run `fi_info -p efa` on the node, or submit again with --exclude={node}",
    ),
    Check("EFA plugin", find_efa_plugin, exit_code=0),
    Check("operators", find_operators),
)
