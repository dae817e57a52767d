"""Which form of each operator serves a model: the best one that this machine has and that takes what the model asks.

A form is a module of its operator's package (where it is the only one, the operator's module; `fused` is one for all).
It imports no library of its own at the top, has the operator's functions and answers, with None or the reason in a
line, takes(use) where there is something that it does not take, and why_unavailable() where it asks more of the machine
than its packages in NEEDS. One whose results are not known to repeat bit for bit says so in VARIES, by operator;
deterministic runs pass it over. A new form is such a module and its name in OPERATORS.

Without torch: names are checked with the settings.
"""

import difflib
from collections.abc import Collection, Mapping
from importlib import import_module
from types import ModuleType
from typing import Any, NamedTuple

from mamba_fsdp.errors import UserError, first_line

FORMS = {  # with the type of device that they are for, "" for any
    "triton": "cuda",  # Triton kernels, compiled on first use
    "fused": "cuda",  # the kernels of mamba-ssm and causal-conv1d
    "native": "cpu",  # C, compiled on first use
    "portable": "",  # plain PyTorch
}
OPERATORS = {  # with their forms, best first
    "conv": ("triton", "fused", "native", "portable"),
    "scan": ("triton", "fused", "native", "portable"),
    "ssd": ("triton", "fused", "portable"),
    "attention": ("portable",),
    "norm": ("triton", "fused", "portable"),
    "loss": ("triton", "portable"),
    "mamba1": ("triton", "fused"),
    "mamba2": ("triton", "fused"),
}
# What benchmarks.gpu found faster than the first form: {"NVIDIA H200": {"conv": "fused", ...}}, the GPU's name as torch
# gives it; a mixer in one call needs the same form for its parts. Nothing has been measured yet.
MEASURED: dict[str, dict[str, str]] = {}
WHOLE = {
    "mamba1": ("conv", "scan"),
    "mamba2": ("conv", "ssd", "norm"),
}  # mixers in one call, in the form of those
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
PORTABLE = {operator: "portable" for operator in OPERATORS.keys() - WHOLE.keys()}


class Use(NamedTuple):
    """What a model asks of an operator. channels: of the convolution or a norm's group; rows: of in_proj."""

    operator: str
    dtype: Any  # torch.dtype of the activations
    documents: bool  # whether boundaries of documents will be given
    channels: int = 0
    rows: int = 0
    deterministic: bool = False  # whether equal runs must be equal bit for bit


class Choice(NamedTuple):
    """What resolve_forms chose: operator -> form, without the whole mixers that run part by part. And what it passed
    over: operator -> {better form for this device: the reason}."""

    forms: dict[str, str]
    passed: dict[str, dict[str, str]]

    def __str__(self) -> str:
        """One line for the log."""
        said: dict[tuple[str, str], list[str]] = {}
        for operator, form in self.forms.items():
            said.setdefault((f"{form}: ", ""), []).append(operator)
        for operator, reasons in self.passed.items():
            for form, reason in reasons.items():
                said.setdefault(("", f" not {form}: {reason}"), []).append(operator)
        return "; ".join(
            before + ", ".join(operators) + after for (before, after), operators in said.items()
        )


def demands(setting: str, used: Collection[str] = OPERATORS) -> dict[str, str]:
    """The form that the setting `kernels` demands of each operator: that of all that have it, or as scan=portable says.

    Raises UserError for names that there are not, with the nearest, and where it demands nothing of those `used`.
    """
    if setting == "auto":
        return {}
    if "=" in setting:
        items = [item.partition("=")[::2] for item in setting.replace(" ", "").split(",")]
    else:
        _check_name(setting, ("auto", *FORMS), setting, "form")
        items = [(operator, setting) for operator in used if setting in OPERATORS[operator]]
    for operator, form in items:
        _check_name(operator, OPERATORS, setting, "operator")
        _check_name(form, OPERATORS[operator], setting, f"form of {operator}")
    absent = [operator for operator, _ in items if operator not in used]
    if absent or not items:
        missing = " or ".join(absent) or "operator of that form"
        raise UserError(f"kernels={setting}: this model has no {missing}, only {', '.join(used)}")
    if len(dict(items)) < len(items):
        raise UserError(f"kernels={setting}: give each operator one form")
    return dict(items)


def _check_name(name, known, setting, what):
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {near[0]}?" if near else f"choose one of {', '.join(known)}"
        raise UserError(f"kernels={setting}: there is no {what} {name!r}; {hint}")


def resolve_forms(
    setting: str,
    device_type: str,
    uses: Mapping[str, Collection[Use]],
    assumed: Collection[str] = (),
) -> Choice:
    """The best form of each operator for all its `uses` on a device (cpu or cuda), or the one that `setting` demands.
    assumed: forms that are available whatever is on this machine.

    Raises UserError where a demanded form can't serve, with the operator and the reason.
    """
    used = [operator for operator in OPERATORS if operator in uses]
    demanded = demands(setting, used)
    choice = Choice({}, {operator: {} for operator in used})
    for operator in used:
        for form in (
            [demanded[operator]] if operator in demanded else _best_first(operator, device_type)
        ):
            unasked = _out_of_question(operator, form, device_type, choice.forms)
            reason = unasked or _why_not(operator, form, uses[operator], assumed)
            if reason is None:
                choice.forms[operator] = form
                break
            if operator in demanded:
                raise UserError(
                    f"kernels={setting}: {operator} can't be {form} on {device_type}: {reason}; "
                    "kernels=auto takes what can serve"
                )
            if not unasked:
                choice.passed[operator][form] = reason
    return choice


def _best_first(operator, device_type):
    """The operator's forms in the order of OPERATORS, behind the one that was measured to be faster on this GPU."""
    if device_type != "cuda" or not MEASURED:
        return OPERATORS[operator]
    import torch

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    best = MEASURED.get(gpu, {}).get(operator)
    return sorted(OPERATORS[operator], key=lambda form: form != best)


def _out_of_question(operator, form, device_type, chosen):
    """Why a form need not be asked, else None."""
    if FORMS[form] not in ("", device_type):
        return f"it is for {FORMS[form]} devices"
    return next(
        (
            f"its {part} is {chosen[part]}"
            for part in WHOLE.get(operator, ())
            if chosen[part] != form
        ),
        None,
    )


def _why_not(operator, form, uses, assumed):
    """What the form answers: None where it serves all `uses`, else the reason."""
    module = modules(f"mamba_fsdp.ops.{operator}")[form]
    varies = getattr(module, "VARIES", {}).get(operator)
    if varies and any(use.deterministic for use in uses):
        return f"deterministic=true, and {varies}"
    reasons = (module.takes(use) for use in uses if hasattr(module, "takes"))
    return (form not in assumed and why_unavailable(operator, form)) or next(
        filter(None, reasons), None
    )


def why_unavailable(operator: str, form: str) -> str | None:
    """What keeps a form from serving on this machine, in a line."""
    for package in NEEDS.get(form, {}).get(operator, ()):
        try:
            import_module(package)
        except Exception as error:  # a build for another PyTorch fails in many ways
            return f"{package} does not load ({type(error).__name__}: {first_line(error)})"
    return getattr(modules(f"mamba_fsdp.ops.{operator}")[form], "why_unavailable", lambda: None)()


def modules(package: str) -> dict[str, ModuleType]:
    """The forms of an operator by name."""
    forms = OPERATORS[package.rpartition(".")[2]]
    if len(forms) == 1:
        return {forms[0]: import_module(package)}
    return {
        form: import_module("mamba_fsdp.ops.fused" if form == "fused" else f"{package}.{form}")
        for form in forms
    }
