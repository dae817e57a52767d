"""Checks whether a machine is fit to train. doctor makes all checks on this machine; preflight makes, on each node of a
job, the checks that can spoil it. Only the checks that need torch import it: without GPUs, preflight takes a second."""

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
OPTIONAL = ("triton", "causal-conv1d", "mamba-ssm")
MODULES = {"PyYAML": "yaml", "causal-conv1d": "causal_conv1d", "mamba-ssm": "mamba_ssm"}
EFA_FOLDER = Path("/sys/class/infiniband")  # where Linux lists EFA devices


class Absent(Exception):
    """The error of a check for something that is absent but not needed."""


@dataclass(frozen=True)
class Finding:
    verdict: str  # ok, FAIL, or - for something that is absent but not needed
    text: str


@dataclass(frozen=True)
class Check:
    """A check. find() returns what it found. It raises Absent, a UserError that says what to do, or an import's
    error."""

    name: str
    find: Callable[[], str]
    exit_code: int | None = (
        None  # of preflight if it fails: 2 the user has to fix it, 1 it may be transient, 0 it is a warning
    )
    if_nodes_differ: str = ""  # what to do if nodes differ; "": they may differ

    def make(self) -> Finding:
        """Returns the verdict, and what was found or what is wrong."""
        try:
            return Finding("ok", self.find())
        except Absent as reason:
            return Finding("-", str(reason))
        except UserError as error:
            return Finding("FAIL", str(error))
        except Exception as error:  # an import can fail in any way
            where = traceback.extract_tb(error.__traceback__)[-1]
            text = f"{type(error).__name__}: {first_line(error)} ({where.filename}:{where.lineno})"
            return Finding("FAIL", text)


def find_python() -> str:
    return f"{platform.python_version()}, {platform.platform()}"


def find_packages() -> str:
    """Returns the versions of the needed packages and of the optional ones that are installed; imports each."""
    versions = []
    for name in (*PACKAGES.split(), *OPTIONAL):
        module = MODULES.get(name, name)
        if name in OPTIONAL and importlib.util.find_spec(module) is None:
            continue
        importlib.import_module(module)
        versions.append(f"{name} {metadata.version(name)}")
    return ", ".join(versions)


def find_environment() -> str:
    machine.check_version()
    if not is_checkout():
        return "an installed package: its versions are pip's choice"
    return "made from this checkout's requirements"


def find_gpus() -> str:
    """Returns the GPUs that Slurm assigned. Raises UserError if the driver shows fewer."""
    shown = machine.driver_gpus()
    assigned = machine.assigned_gpus()
    if assigned > len(shown):
        node = machine.node_name()
        raise UserError(
            f"Slurm assigned {format_count(assigned, 'GPU')}, but the driver shows {len(shown)}; look at `nvidia-smi` there and "
            f"take the node out: scontrol update nodename={node} state=drain reason=gpu; "
            "with an image and the same on all nodes, see docs/image.md"
        )
    if not assigned:
        raise Absent("0 GPUs")
    return f"{format_count(assigned, 'GPU')} {', '.join(sorted(set(shown[:assigned])))}"


def find_torch_gpus() -> str:
    """Returns what torch knows of the first GPU. Raises UserError if torch can't open it."""
    if not machine.assigned_gpus():
        raise Absent("0 GPUs")
    import torch

    from mamba_fsdp.parallel.world import has_gpus
    from mamba_fsdp.planning.devices import device_peak

    if not has_gpus():
        raise Absent("the NVIDIA driver shows none")
    about = torch.cuda.get_device_properties(0)
    peak = device_peak(about.name)
    rate = f"{peak / 1e12:.0f} TFLOP/s in bf16" if peak else "peak rate unknown, so no MFU"
    return f"{about.total_memory / 2**30:.0f} GiB, sm_{about.major}{about.minor}, {rate}"


def find_torch_code() -> str:
    """Returns for which GPUs torch has code. Raises UserError if the first GPU here is none of them."""
    import torch

    if not torch.cuda.is_available():
        raise Absent("no GPU to run it")
    architectures = torch.cuda.get_arch_list()  # sm_90, and sm_90a with features of its own
    about = torch.cuda.get_device_properties(0)
    numbers = [int(re.sub(r"\D", "", name)) for name in architectures]
    if not any(n // 10 == about.major and n % 10 <= about.minor for n in numbers):
        raise UserError(
            f"torch {torch.__version__} has no code for {about.name} (sm_{about.major}{about.minor}), but for "
            f"{', '.join(architectures)}; take the stack that docs/image.md names for this GPU"
        )
    return ", ".join(architectures)


def efa_devices() -> int:
    drivers = [(path / "device/driver").resolve().name for path in EFA_FOLDER.glob("*")]
    return drivers.count("efa")


def find_efa() -> str:
    count = efa_devices()
    if not count:
        raise Absent("0 EFA devices")
    return f"{count} EFA devices"


def find_efa_plugin() -> str:
    if not efa_devices():
        raise Absent("no EFA devices")
    plugin = machine.efa_plugin()
    if not plugin:
        raise UserError(
            "EFA devices, but no libnccl-net.so (aws-ofi-nccl) that NCCL can load to use them, so it takes TCP; build the "
            "image with INSTALL_EFA=1 (docs/image.md), or if there is a libnccl-net-ofi.so, set NCCL_NET_PLUGIN=ofi"
        )
    return plugin


def find_operators() -> str:
    """Returns the backend that a run would choose for each operator, and why it passed over better ones. On a GPU, each
    backend is tested."""
    from mamba_fsdp.inference.loading import inference_world
    from mamba_fsdp.model.config import ModelConfig
    from mamba_fsdp.settings.train_config import TrainConfig
    from mamba_fsdp.trainer.kernel_selection import choose_for_inference

    settings = TrainConfig(ModelConfig(layers="mamba1,mamba2,attention", d_model=256))
    device = inference_world().device
    return f"{device}: {choose_for_inference(settings, device)}"


CHECKS: Sequence[Check] = (
    Check("Python", find_python),
    Check("packages", find_packages),
    Check("environment", find_environment, exit_code=2),
    Check(
        "GPUs",
        find_gpus,
        exit_code=1,
        if_nodes_differ="choose one kind with --partition or --constraint, or leave the node out with "
        "--exclude={node}",
    ),
    Check("torch's GPUs", find_torch_gpus, exit_code=1),
    Check("torch's code", find_torch_code, exit_code=2),
    Check(
        "EFA",
        find_efa,
        exit_code=1,
        if_nodes_differ="look at `fi_info -p efa` there, or submit again with --exclude={node}",
    ),
    Check("EFA plugin", find_efa_plugin, exit_code=0),
    Check("operators", find_operators),
)
