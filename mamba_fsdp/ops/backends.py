"""Which backend of each operator serves a model: the best one that this machine has and that takes what the model asks.

A backend is a module of its operator's package (where it is the only one, the operator's module; `fused` is one for all).
It imports no library of its own at the top, has the operator's functions and answers, with None or the reason in a
line, takes(use) where there is something that it does not take, and why_unavailable() where it asks more of the machine
than its packages in NEEDS. One whose results are not known to repeat bit for bit says so in VARIES, by operator;
deterministic runs pass it over. A new backend is such a module and its name in OPERATORS.

Without torch: names are checked with the settings.
"""

import difflib
from collections.abc import Collection, Mapping
from importlib import import_module
from types import ModuleType
from typing import Any, NamedTuple

from mamba_fsdp.errors import UserError, first_line

BACKENDS = {  # with the type of device that they are for, "" for any
    "triton": "cuda",  # Triton kernels, compiled on first use
    "fused": "cuda",  # the kernels of mamba-ssm and causal-conv1d
    "cpp": "cpu",  # C, compiled on first use
    "reference": "",  # plain PyTorch
}
ALIASES = {"native": "cpp", "portable": "reference"}  # names in older settings
OPERATORS = {  # with their backends, best first
    "conv": ("triton", "fused", "cpp", "reference"),
    "scan": ("triton", "fused", "cpp", "reference"),
    "ssd": ("triton", "fused", "reference"),
    "attention": ("reference",),
    "norm": ("triton", "fused", "reference"),
    "loss": ("triton", "reference"),
    "mamba1": ("triton", "fused"),
    "mamba2": ("triton", "fused"),
}
# What benchmarks.gpu found faster than the first backend: {"NVIDIA H200": {"conv": "fused", ...}}, the GPU's name as torch
# gives it; a mixer in one call needs the same backend for its parts. Nothing has been measured yet.
MEASURED: dict[str, dict[str, str]] = {}
WHOLE = {
    "mamba1": ("conv", "scan"),
    "mamba2": ("conv", "ssd", "norm"),
}  # mixers in one call, in the backend of those
NEEDS: dict[str, dict[str, tuple[str, ...]]] = {  # packages
    "triton": dict.fromkeys(OPERATORS, ("triton",)),
    "fused": {
        "conv": ("causal_conv1d",),
        "scan": ("mamba_ssm",),
        "ssd": ("mamba_ssm",),
        "norm": ("mamba_ssm",),
        "mamba1": ("mamba_ssm", "causal_conv1d"),
        "mamba2": ("mamba_ssm", "causal_conv1d"),
    },
}
REFERENCE = {operator: "reference" for operator in OPERATORS.keys() - WHOLE.keys()}


class Use(NamedTuple):
    """What a model asks of an operator. channels: of the convolution or a norm's group; rows: of in_proj."""

    operator: str
    dtype: Any  # torch.dtype of the activations
    seq_idx: bool  # whether boundaries of documents will be given
    channels: int = 0
    rows: int = 0
    deterministic: bool = False  # whether equal runs must be equal bit for bit


class Choice(NamedTuple):
    """What resolve_backends chose: operator -> backend, without the whole mixers that run part by part. And what it passed
    over: operator -> {better backend for this device: the reason}."""

    backends: dict[str, str]
    passed: dict[str, dict[str, str]]

    def __str__(self) -> str:
        """One line for the log."""
        said: dict[tuple[str, str], list[str]] = {}
        for operator, backend in self.backends.items():
            said.setdefault((f"{backend}: ", ""), []).append(operator)
        for operator, reasons in self.passed.items():
            for backend, reason in reasons.items():
                said.setdefault(("", f" not {backend}: {reason}"), []).append(operator)
        return "; ".join(
            before + ", ".join(operators) + after for (before, after), operators in said.items()
        )


def demands(setting: str, used: Collection[str] = OPERATORS) -> dict[str, str]:
    """The backend that the setting `kernels` demands of each operator: that of all that have it, or as scan=reference says.

    Raises UserError for names that there are not, with the nearest, and where it demands nothing of those `used`.
    """
    if setting == "auto":
        return {}
    if "=" in setting:
        items = [item.partition("=")[::2] for item in setting.replace(" ", "").split(",")]
        items = [(operator, ALIASES.get(backend, backend)) for operator, backend in items]
    else:
        setting = ALIASES.get(setting, setting)
        _check_name(setting, ("auto", *BACKENDS), setting, "backend")
        items = [(operator, setting) for operator in used if setting in OPERATORS[operator]]
    for operator, backend in items:
        _check_name(operator, OPERATORS, setting, "operator")
        _check_name(backend, OPERATORS[operator], setting, f"backend of {operator}")
    absent = [operator for operator, _ in items if operator not in used]
    if absent or not items:
        missing = " or ".join(absent) or "operator of that backend"
        raise UserError(f"kernels={setting}: this model has no {missing}, only {', '.join(used)}")
    if len(dict(items)) < len(items):
        raise UserError(f"kernels={setting}: give each operator one backend")
    return dict(items)


def _check_name(name, known, setting, what):
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {near[0]}?" if near else f"choose one of {', '.join(known)}"
        raise UserError(f"kernels={setting}: there is no {what} {name!r}; {hint}")


def resolve_backends(
    setting: str,
    device_type: str,
    uses: Mapping[str, Collection[Use]],
    assumed: Collection[str] = (),
) -> Choice:
    """The best backend of each operator for all its `uses` on a device (cpu or cuda), or the one that `setting` demands.
    assumed: backends that are available whatever is on this machine.

    Raises UserError where a demanded backend can't serve, with the operator and the reason.
    """
    used = [operator for operator in OPERATORS if operator in uses]
    demanded = demands(setting, used)
    choice = Choice({}, {operator: {} for operator in used})
    for operator in used:
        for backend in (
            [demanded[operator]] if operator in demanded else _best_first(operator, device_type)
        ):
            unasked = _out_of_question(operator, backend, device_type, choice.backends)
            reason = unasked or _why_not(operator, backend, uses[operator], assumed)
            if reason is None:
                choice.backends[operator] = backend
                break
            if operator in demanded:
                raise UserError(
                    f"kernels={setting}: {operator} can't be {backend} on {device_type}: {reason}; "
                    "kernels=auto takes what can serve"
                )
            if not unasked:
                choice.passed[operator][backend] = reason
    return choice


def _best_first(operator, device_type):
    """The operator's backends in the order of OPERATORS, behind the one that was measured to be faster on this GPU."""
    if device_type != "cuda" or not MEASURED:
        return OPERATORS[operator]
    import torch

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    best = MEASURED.get(gpu, {}).get(operator)
    return sorted(OPERATORS[operator], key=lambda backend: backend != best)


def _out_of_question(operator, backend, device_type, chosen):
    """Why a backend need not be asked, else None."""
    if BACKENDS[backend] not in ("", device_type):
        return f"it is for {BACKENDS[backend]} devices"
    return next(
        (
            f"its {part} is {chosen[part]}"
            for part in WHOLE.get(operator, ())
            if chosen[part] != backend
        ),
        None,
    )


def _why_not(operator, backend, uses, assumed):
    """What the backend answers: None where it serves all `uses`, else the reason."""
    module = modules(f"mamba_fsdp.ops.{operator}")[backend]
    varies = getattr(module, "VARIES", {}).get(operator)
    if varies and any(use.deterministic for use in uses):
        return f"deterministic=true, and {varies}"
    reasons = (module.takes(use) for use in uses if hasattr(module, "takes"))
    return (backend not in assumed and why_unavailable(operator, backend)) or next(
        filter(None, reasons), None
    )


def why_unavailable(operator: str, backend: str) -> str | None:
    """What keeps a backend from serving on this machine, in a line."""
    for package in NEEDS.get(backend, {}).get(operator, ()):
        try:
            import_module(package)
        except Exception as error:  # a build for another PyTorch fails in many ways
            return f"{package} does not load ({type(error).__name__}: {first_line(error)})"
    return getattr(
        modules(f"mamba_fsdp.ops.{operator}")[backend], "why_unavailable", lambda: None
    )()


def modules(package: str) -> dict[str, ModuleType]:
    """The backends of an operator by name."""
    backends = OPERATORS[package.rpartition(".")[2]]
    if len(backends) == 1:
        return {backends[0]: import_module(package)}
    return {
        backend: import_module(
            "mamba_fsdp.ops.fused" if backend == "fused" else f"{package}.{backend}"
        )
        for backend in backends
    }
