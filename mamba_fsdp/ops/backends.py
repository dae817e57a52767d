"""Chooses a backend for each operator of a model: the best one that works on this machine and supports the model.

A backend is a module in its operator's package (`fused` is one module for all operators) with the operator's functions.
These functions import the backend's library only when they are called. If there are conditions for the use of the
backend, the module also has these functions:

    why_not(use)        Returns None if the backend supports the Use, otherwise the reason in one line.
    why_unavailable()   Returns None, or what this machine lacks besides the backend's PACKAGES.

To add a backend, write such a module, and add its name to OPERATORS. This file does not need torch, so that the settings
can use it to check names without torch.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from types import ModuleType
from typing import Any

from mamba_fsdp.errors import UserError, first_line
from mamba_fsdp.text import suggest_name

BACKENDS = {  # {backend: the type of device that it is for}
    "triton": "cuda",  # our Triton kernels, compiled on first use
    "fused": "cuda",  # the kernels of mamba-ssm, causal-conv1d and flash-linear-attention
    "flash": "cuda",  # FlashAttention in PyTorch itself
    "cpp": "cpu",  # C, compiled on first use
    "reference": "any",  # plain PyTorch
}
PACKAGES = {"triton": ("triton",), "fused": ("mamba_ssm", "causal_conv1d")}
PACKAGES_OF_OPERATOR = {"gdn": {"fused": ("fla.ops.gated_delta_rule",)}}  # these replace PACKAGES
HINTS = {  # {package that a backend needs: how to get it}
    "fla.ops.gated_delta_rule": (
        "; pip install -r requirements/fla.txt, which needs torch 2.7 and Triton 3.3 or newer and so not the torch2.2 stack"
    )
}
OPERATORS = {  # {operator: its backends, best first}; on a GPU, trainer/kernel_selection.py times them
    "conv": ("triton", "fused", "cpp", "reference"),
    "scan": ("triton", "fused", "cpp", "reference"),
    "ssd": ("triton", "fused", "reference"),
    "gdn": ("fused", "reference"),
    "attention": ("flash", "reference"),
    "norm": ("triton", "fused", "reference"),
    "loss": ("triton", "reference"),
    "mamba1": ("triton", "fused"),
    "mamba2": ("triton", "fused"),
}
# {operator: names in the setting `kernels` that demand a backend in its simpler form}; see use_simpler_form.
SIMPLER = {"ssd": ("triton-simpler",)}
# {mixer that a backend can compute in one call: the operators that are its parts}. A mixer can use a backend only if each
# of its parts that has this backend uses it too.
MIXER_PARTS = {"mamba1": ("conv", "scan"), "mamba2": ("conv", "ssd", "norm")}
REFERENCE = {operator: "reference" for operator in OPERATORS if operator not in MIXER_PARTS}


@dataclass(frozen=True)
class Use:
    """A model's requirements on an operator."""

    operator: str
    dtype: Any  # torch.dtype of the activations
    seq_idx: bool  # whether state, convolution and attention stay within a document
    # Convolution: its channels. scan and gdn: d_state. Attention: the size of a head.
    channels: int = 0
    rows: int = 0  # mixers: the rows of the input projection; else 0
    deterministic: bool = False  # whether equal runs must be equal bit for bit
    elements: int = 0  # number of elements of the largest tensor of a batch; 0 if it is not known
    in_parts: bool = False  # whether ranks share sequences and pass states to the next rank


@dataclass
class BackendChoice:
    """The backends that resolve_backends chose, and why it rejected better ones."""

    backends: dict[str, str] = field(default_factory=dict)  # {operator: backend}
    # {operator: {better backend for this device: why it was rejected}}
    passed: dict[str, dict[str, str]] = field(default_factory=dict)

    def __str__(self) -> str:
        """Returns one line for the log."""
        chosen: dict[str, list[str]] = {}
        for operator, backend in self.backends.items():
            chosen.setdefault(backend, []).append(operator)
        passed: dict[str, list[str]] = {}
        for operator, reasons in self.passed.items():
            for backend, reason in reasons.items():
                passed.setdefault(f"not {backend}: {reason}", []).append(operator)
        lines = [f"{backend}: {', '.join(operators)}" for backend, operators in chosen.items()]
        lines += [f"{', '.join(operators)} {reason}" for reason, operators in passed.items()]
        return "; ".join(lines)


def demands(setting: str, used: Collection[str] = OPERATORS) -> dict[str, str]:
    """Returns {operator: backend} that the setting `kernels` demands; {} for auto.

    The setting names one backend, for all operators in `used` that have it, or a backend for each operator, as in
    scan=reference,conv=cpp. A backend that is demanded for a mixer is then also demanded for those of its parts that have
    it and are not in the setting. ssd=triton-simpler demands triton.

    Raises UserError for an unknown name, with the nearest one, for an operator that is given twice or is not in `used`,
    and if no operator in `used` has the one backend.
    """
    if setting == "auto":
        return {}
    demanded = {}
    if "=" in setting:
        for item in setting.replace(" ", "").split(","):
            operator, _, backend = item.partition("=")
            _check_name(operator, OPERATORS, setting, "operator")
            names = (*OPERATORS[operator], *SIMPLER.get(operator, ()))
            _check_name(backend, names, setting, f"backend of {operator}")
            if operator in demanded:
                raise UserError(f"kernels={setting}: give each operator one backend")
            demanded[operator] = backend.partition("-")[0]
        for operator, backend in list(demanded.items()):
            for part in parts_with(operator, backend):
                demanded.setdefault(part, backend)
    else:
        _check_name(setting, ("auto", *BACKENDS), setting, "backend")
        demanded = {operator: setting for operator in used if setting in OPERATORS[operator]}
    absent = [operator for operator in demanded if operator not in used]
    if absent or not demanded:
        missing = " or ".join(absent) or "operator with that backend"
        raise UserError(
            f"kernels={setting}: this model has no {missing}, only {', '.join(used)}; kernels=auto chooses backends that work"
        )
    return demanded


def _check_name(name: str, names: Collection[str], setting: str, what: str) -> None:
    if name not in names:
        hint = suggest_name(name, names, f"choose one of {', '.join(names)}")
        raise UserError(f"kernels={setting}: there is no {what} {name!r}; {hint}")


def resolve_backends(
    setting: str,
    device_type: str,
    uses: Mapping[str, Collection[Use]],
    assumed: Collection[str] = (),
    failed: Mapping[tuple[str, str], str] = {},
    preferred: Mapping[str, str] = {},
) -> BackendChoice:
    """Returns the choice of a backend for each operator: the best one for all its `uses` on a type of device (cpu or
    cuda), or the one that `setting` demands. A mixer that no backend can compute in one call is left out.

    assumed: backends that count as available, whether this machine has them or not. failed: {(operator, backend): why
    its test failed}. preferred: {operator: the backend to try first}. Raises UserError, with the operator and the reason,
    if a demanded backend can't be used.
    """
    used = [operator for operator in OPERATORS if operator in uses]
    demanded = demands(setting, used)
    choice = BackendChoice()
    for operator in used:
        best_first = list(OPERATORS[operator])
        if preferred.get(operator) in best_first:
            best_first.insert(0, preferred[operator])
        if operator in demanded:
            best_first = [demanded[operator]]
        for backend in best_first:
            is_no_candidate = _why_no_candidate(operator, backend, device_type, choice.backends)
            reason = is_no_candidate or failed.get((operator, backend))
            reason = reason or why_not(operator, backend, uses[operator], assumed)
            if not reason:
                choice.backends[operator] = backend
                break
            if operator in demanded:
                raise UserError(
                    f"kernels={setting}: {operator} can't be {backend} on {device_type}: {reason}; "
                    "kernels=auto takes one that works"
                )
            if not is_no_candidate:
                choice.passed.setdefault(operator, {})[backend] = reason
    return choice


def candidates(
    demanded: Mapping[str, str], device_type: str, uses: Mapping[str, Collection[Use]]
) -> Iterator[tuple[str, str]]:
    """Yields each (operator, backend) that resolve_backends may choose, except the reference. A mixer is a candidate only
    if all its parts that have the backend are candidates, and it comes after them."""
    known: set[tuple[str, str]] = set()
    for operator in OPERATORS:
        for backend in OPERATORS[operator]:
            is_allowed = operator in uses and demanded.get(operator, backend) == backend
            is_for_device = BACKENDS[backend] == device_type
            has_parts = known.issuperset((part, backend) for part in parts_with(operator, backend))
            is_possible = is_allowed and is_for_device and has_parts
            if is_possible and not why_not(operator, backend, uses[operator]):
                known.add((operator, backend))
                yield operator, backend


def _why_no_candidate(
    operator: str, backend: str, device_type: str, chosen: Mapping[str, str]
) -> str | None:
    """Returns why a backend is not a candidate: it is for another device, or a part of the mixer has another backend.
    Returns None for a candidate."""
    if BACKENDS[backend] not in ("any", device_type):
        return f"{backend} is for {BACKENDS[backend]} devices"
    for part in parts_with(operator, backend):
        if chosen[part] != backend:
            return f"the backend of {part} is {chosen[part]}"
    return None


def parts_with(operator: str, backend: str) -> list[str]:
    """Returns the parts of a mixer that have the backend; [] if the operator is not a mixer."""
    return [part for part in MIXER_PARTS.get(operator, ()) if backend in OPERATORS[part]]


def why_not(
    operator: str, backend: str, uses: Collection[Use], assumed: Collection[str] = ()
) -> str | None:
    """Returns why a backend does not support all `uses`, or None if it does.

    assumed: backends that count as available, whether this machine has them or not."""
    if backend not in assumed:
        reason = why_unavailable(operator, backend)
        if reason:
            return reason
    module = modules(f"mamba_fsdp.ops.{operator}")[backend]
    if hasattr(module, "why_not"):
        for use in uses:
            reason = module.why_not(use)
            if reason:
                return reason
    return None


def why_unavailable(operator: str, backend: str) -> str | None:
    """Returns why a backend can't be used on this machine, in one line, or None if it can."""
    packages = PACKAGES_OF_OPERATOR.get(operator, PACKAGES)
    for package in packages.get(backend, ()):
        try:
            import_module(package)
        except Exception as error:  # wrong builds fail in many ways
            hint = HINTS.get(package, "")
            return f"{package} does not load ({type(error).__name__}: {first_line(error)}){hint}"
    module = modules(f"mamba_fsdp.ops.{operator}")[backend]
    return module.why_unavailable() if hasattr(module, "why_unavailable") else None


def demands_simpler_form(setting: str, operator: str) -> bool:
    """Returns whether the setting `kernels` demands the simpler form of a backend of this operator."""
    items = setting.replace(" ", "").split(",")
    return any(f"{operator}={name}" in items for name in SIMPLER.get(operator, ()))


def use_simpler_form(operator: str, backend: str) -> bool:
    """Makes a backend use simpler instructions of the GPU from then on. Returns False if it has no simpler form."""
    module = modules(f"mamba_fsdp.ops.{operator}")[backend]
    if not hasattr(module, "use_simpler_form"):
        return False
    module.use_simpler_form()
    return True


def modules(package: str) -> dict[str, ModuleType]:
    """Returns {name of a backend: its module} for one operator. package: the operator's package, such as
    mamba_fsdp.ops.conv."""
    backends = {}
    for name in OPERATORS[package.rpartition(".")[2]]:
        path = "mamba_fsdp.ops.fused" if name == "fused" else f"{package}.{name}"
        backends[name] = import_module(path)
    return backends
