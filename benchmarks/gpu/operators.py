"""Each backend of each operator on this device: errors beside the reference backend in float64, equal bits twice, and time."""

import time
from collections.abc import Callable, Iterator
from importlib import import_module

import torch

from mamba_fsdp.ops.backends import BACKENDS, OPERATORS, why_unavailable

EXACT = dict(batch=2, length=300, channels=256, states=16, heads=8)
LARGE = dict(batch=8, length=2048, channels=4096, states=16, heads=64)  # mamba-1.4b's
TINY = dict(batch=1, length=20, channels=32, states=8, heads=2)
FUNCTIONS = {
    "conv": "causal_conv_silu",
    "scan": "selective_scan",
    "ssd": "ssd",
    "norm": "add_rms_norm",
}
FP32 = {"A", "D", "dt_bias", "residual", "weight", "bias"}  # also where the activations are bf16
ROUNDS = 5

Tensors = dict[str, torch.Tensor]


def inputs(operator: str, size: dict[str, int], device: torch.device) -> tuple[Tensors, dict]:
    """Returns (the tensors of a call that get a gradient, float64, by name; its other keywords)."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(device)

    rows = (size["batch"], size["length"])
    channels = size["channels"]
    states = size["states"]
    heads = size["heads"]
    if operator == "conv":
        return dict(x=draw(*rows, channels), weight=draw(channels, 1, 4), bias=draw(channels)), {}
    if operator == "scan":
        return dict(
            u=draw(*rows, channels),
            dt=draw(*rows, channels),
            A=-draw(channels, states).exp(),
            B=draw(*rows, states),
            C=draw(*rows, states),
            D=draw(channels),
            z=draw(*rows, channels),
            dt_bias=draw(channels) - 4,
        ), {}
    if operator == "ssd":
        wide = max(16, 4 * states)
        return dict(
            x=draw(*rows, heads, channels // heads),
            dt=draw(*rows, heads),
            A=-draw(heads).exp(),
            B=draw(*rows, 1, wide),
            C=draw(*rows, 1, wide),
            D=draw(heads),
            dt_bias=draw(heads) - 4,
        ), dict(chunk_size=256)
    tensors = dict(x=draw(*rows, channels), residual=draw(*rows, channels))
    return tensors | dict(weight=draw(channels)), dict(eps=1e-5)


def make_call(
    operator: str, backend: str, tensors: Tensors, more: dict, dtype: torch.dtype
) -> Callable[[], list[torch.Tensor]]:
    """Returns a function that runs forward and backward and returns outputs and gradients."""
    function = getattr(import_module(f"mamba_fsdp.ops.{operator}"), FUNCTIONS[operator])
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    leaves = {}
    for name, tensor in tensors.items():
        leaves[name] = tensor.to(wide if name in FP32 else dtype).requires_grad_()
    if operator == "norm":
        more = {**more, "out_dtype": dtype}

    def run():
        out = function(**leaves, **more, backend=backend)
        outs = [out] if torch.is_tensor(out) else list(out)
        total = sum((tensor * tensor.detach().cos()).sum(dtype=wide) for tensor in outs)
        gradients = torch.autograd.grad(total, list(leaves.values()))
        return [*(tensor.detach() for tensor in outs), *gradients]

    return run


def largest_error(got: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    """Returns the largest error of all tensors, each relative to its largest value."""
    errors = [
        (mine.double() - true).abs().max() / true.abs().max().clamp(min=1e-30)
        for mine, true in zip(got, expected)
    ]
    return float(max(errors))


def milliseconds(run: Callable, device: torch.device) -> float:
    run()
    times = []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(1e3 * (time.perf_counter() - began))
    return min(times)


def measure(device: torch.device, rehearse: bool) -> Iterator[dict[str, object]]:
    for operator in FUNCTIONS:
        exact, more = inputs(operator, TINY if rehearse else EXACT, device)
        large, large_more = inputs(operator, TINY if rehearse else LARGE, device)
        expected = make_call(operator, "reference", exact, more, torch.float64)()
        for backend in OPERATORS[operator]:
            row: dict[str, object] = {"operator": operator, "backend": backend}
            row |= dict.fromkeys(("error fp32", "error bf16", "same bits", "ms", "note"), "")
            reason = why_unavailable(operator, backend)
            if BACKENDS[backend] not in ("", device.type):
                continue
            if reason:
                yield row | {"note": reason}
                continue
            in_fp32 = make_call(operator, backend, exact, more, torch.float32)
            in_bf16 = make_call(operator, backend, exact, more, torch.bfloat16)
            row["error fp32"] = f"{largest_error(in_fp32(), expected):.1e}"
            row["error bf16"] = f"{largest_error(in_bf16(), expected):.1e}"
            same = all(map(torch.equal, in_bf16(), in_bf16()))
            row["same bits"] = "yes" if same else "no"
            call = make_call(operator, backend, large, large_more, torch.bfloat16)
            yield row | {"ms": f"{milliseconds(call, device):.3f}"}
