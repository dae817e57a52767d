"""Records the arguments with which layers of real sizes launch our Triton kernels. No kernel runs, and no GPU is needed."""

import inspect
import math
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from importlib import import_module
from typing import Any
from unittest.mock import patch

import torch

from mamba_fsdp.model.config import ModelConfig
from mamba_fsdp.model.presets import preset
from mamba_fsdp.ops import triton as glue
from mamba_fsdp.ops.backends import OPERATORS
from mamba_fsdp.settings.train_config import TrainConfig
from mamba_fsdp.trainer.layer_check import LayerCheck, Rows

KERNEL_OPERATORS = ("conv", "loss", "norm", "scan", "ssd")
HEADDIM = 64  # the headdim of the models with SSD
MODELS = ("mamba-1.4b", "mamba2-2.7b")
# [(whether there are several documents, shape of the input)]. The rows of the first case are short and without documents. The
# rows of the second case are cut into segments, need masks, and have documents.
CASES = ((False, Rows(1, 64)), (True, Rows(1, 602)))
BACKENDS = {
    name: "triton" if "triton" in known else "reference" for name, known in OPERATORS.items()
}
POINTERS = {
    torch.float64: "*fp64",
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.int32: "*i32",
    torch.int64: "*i64",
}
# {(operator, kernel): factors of Launch.elements}; a factor is the name of a constant, or a number
ELEMENTS: dict[tuple[str, str], tuple[Any, ...]] = {
    ("conv", "walk"): (4, "CHANNELS"),
    ("loss", "cross_entropy"): ("BLOCK",),
    ("norm", "norm"): ("BLOCK",),
    ("norm", "norm_back"): ("BLOCK",),
    ("scan", "sweep"): (4, "CHANNELS", "N"),
    ("scan", "backward"): (4, "CHANNELS", "N"),
    ("ssd", "add_up"): ("W", "HEADS", HEADDIM),
    ("ssd", "sweep"): ("Q", "P"),
    ("ssd", "near"): ("W", "P", "TILES"),
    ("ssd", "far"): ("ROWS", "P"),
    ("ssd", "finish"): ("W", HEADDIM),
}


@dataclass(frozen=True)
class Launch:
    """The arguments of Triton's compiler for a launch."""

    operator: str
    kernel: str  # the name of the kernel's function
    signature: Mapping[str, str]  # {argument: its type, such as "*bf16", "*i32", "i64" or "fp32"}
    # {argument: value}, for tl.constexpr arguments, for tensors that are None, and for integers that are 1.
    constants: Mapping[str, Any]
    aligned: tuple[str, ...]  # arguments that are multiples of 16
    warps: int
    stages: int

    @property
    def title(self) -> str:
        flags = ["BACK", "REVERSE", "LOCAL", "CUT"]
        variant = [flag.lower() for flag in flags if self.constants.get(flag)]
        if {"seq_idx", "SEQ_IDX"} & self.signature.keys():
            variant.append("documents")
        return " ".join([self.operator, self.kernel, *variant])

    @property
    def elements(self) -> int:
        """Returns the number of elements in one iteration of the kernel's innermost loop. An element is a (token, channel,
        state) for the scan, and a (token, channel) for other kernels."""
        factors = ELEMENTS[self.operator, self.kernel]
        return math.prod(self.constants.get(factor, factor) for factor in factors)


class Recorder:
    """Takes the place of a kernel. A launch does not run the kernel, but is added to `launches` if it is not there yet."""

    def __init__(self, operator: str, kernel: Any, launches: list[Launch]) -> None:
        self.operator = operator
        self.kernel = kernel.__name__
        self.parameters = inspect.signature(kernel.fn).parameters
        self.launches = launches

    def __getitem__(self, grid: Any) -> "Recorder":
        return self

    def __call__(self, *positional: Any, num_warps: int = 4, num_stages: int = 3, **named: Any):
        values = dict(zip(self.parameters, positional)) | named
        constants = {}
        signature = {}
        aligned = []
        for name, parameter in self.parameters.items():
            value = values.get(name, parameter.default)
            is_constant = "constexpr" in str(parameter.annotation)
            is_one = type(value) is int and value == 1 and name not in glue.LENGTH_ARGUMENTS
            if is_constant or value is None or is_one:
                constants[name] = value
                continue
            signature[name] = type_of(value)
            number = value.data_ptr() if isinstance(value, torch.Tensor) else value
            is_aligned = isinstance(number, int) and number % 16 == 0
            if is_aligned and name not in glue.LENGTH_ARGUMENTS:
                aligned.append(name)
        launch = Launch(
            self.operator, self.kernel, signature, constants, tuple(aligned), num_warps, num_stages
        )
        if launch not in self.launches:
            self.launches.append(launch)


def type_of(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return POINTERS[value.dtype]
    if isinstance(value, float):
        return "fp32"
    return "i32" if -(2**31) <= value < 2**31 else "i64"


def launches_on(cc: int, precision: str = "bf16") -> list[Launch]:
    """Returns the different launches in the layers of MODELS on a GPU. cc: its compute capability, such as 90."""
    launches: list[Launch] = []

    def blocks_on(table: Mapping[tuple[int, int], glue.Blocks], device: Any) -> glue.Blocks:
        return table[max(capability for capability in table if capability <= divmod(cc, 10))]

    with ExitStack() as patched:
        patched.enter_context(patch.object(glue, "blocks", blocks_on))
        for operator in KERNEL_OPERATORS:
            module = import_module(f"mamba_fsdp.ops.{operator}.triton_kernels")
            for name, kernel in list(vars(module).items()):
                if hasattr(kernel, "fn"):
                    recorder = Recorder(operator, kernel, launches)
                    patched.enter_context(patch.object(module, name, recorder))
        for name in MODELS:
            for has_documents, rows in CASES:
                settings = TrainConfig(ModelConfig(**preset(name)))
                settings = settings.with_values(
                    mixed_precision=precision, reset_at_documents=has_documents
                )
                check = LayerCheck(settings, torch.device("cpu"))
                check.run(check.make_model(check.kinds, BACKENDS), rows)
    return launches
