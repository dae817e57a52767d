"""Each backend of each operator on this device: errors beside the reference backend in float64, equal bits twice, and time."""

import time
from importlib import import_module

import torch

from mamba_fsdp.ops.backends import BACKENDS, OPERATORS, why_unavailable

EXACT = dict(batch=2, length=300, channels=256, states=16, heads=8, groups=2, vocab=1000)
LARGE = dict(
    batch=8, length=2048, channels=4096, states=16, heads=64, groups=1, vocab=50280
)  # mamba-1.4b's
TINY = dict(batch=1, length=20, channels=32, states=8, heads=2, groups=1, vocab=50)


def inputs(operator, size, device):
    """The tensors of one call in float64, by name; those that get a gradient, and keywords."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(device)

    batch, length, channels, states = (
        size["batch"],
        size["length"],
        size["channels"],
        size["states"],
    )
    if operator == "conv":
        return dict(
            x=draw(batch, length, channels), weight=draw(channels, 1, 4), bias=draw(channels)
        ), {}
    if operator == "scan":
        return dict(
            u=draw(batch, length, channels),
            dt=draw(batch, length, channels),
            A=-draw(channels, states).exp(),
            B=draw(batch, length, states),
            C=draw(batch, length, states),
            D=draw(channels),
            z=draw(batch, length, channels),
            dt_bias=draw(channels) - 4,
        ), {}
    if operator == "ssd":
        heads, groups, states = size["heads"], size["groups"], max(16, 4 * states)
        return dict(
            x=draw(batch, length, heads, channels // heads),
            dt=draw(batch, length, heads),
            A=-draw(heads).exp(),
            B=draw(batch, length, groups, states),
            C=draw(batch, length, groups, states),
            D=draw(heads),
            dt_bias=draw(heads) - 4,
        ), dict(chunk_size=256)
    if operator == "norm":
        return dict(
            x=draw(batch, length, channels),
            residual=draw(batch, length, channels),
            weight=draw(channels),
        ), {}
    labels = torch.randint(size["vocab"], (batch * length,), generator=generator).to(device)
    return dict(
        hidden=draw(batch * length, channels // 2), weight=draw(size["vocab"], channels // 2) / 30
    ), dict(labels=labels)


FUNCTIONS = {
    "conv": "causal_conv_silu",
    "scan": "selective_scan",
    "ssd": "ssd",
    "norm": "add_rms_norm",
    "loss": "linear_cross_entropy",
}
FP32 = {
    "A",
    "D",
    "dt_bias",
    "residual",
    "weight",
    "bias",
}  # what stays so where the activations are bf16


def step(operator, backend, tensors, more, dtype):
    """Forward and backward: () -> outputs and gradients. Its tensors are made once."""
    function = getattr(import_module(f"mamba_fsdp.ops.{operator}"), FUNCTIONS[operator])
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    leaves = {
        name: tensor.to(wide if name in FP32 else dtype).requires_grad_()
        for name, tensor in tensors.items()
    }
    extra = dict(eps=1e-5, out_dtype=dtype) if operator == "norm" else {}

    def run():
        out = function(**leaves, **more, **extra, backend=backend)
        outs = [out] if torch.is_tensor(out) else list(out)
        total = sum((tensor * tensor.detach().cos()).sum(dtype=wide) for tensor in outs)
        return [tensor.detach() for tensor in outs] + list(
            torch.autograd.grad(total, list(leaves.values()))
        )

    return run


def error(got, expected):
    """The largest of all tensors', each relative to its largest value."""
    return max(
        float((a.double() - b).abs().max() / b.abs().max().clamp(min=1e-30))
        for a, b in zip(got, expected)
    )


def milliseconds(run, device, rounds=5):
    def wait():
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    run()
    times = []
    for _ in range(rounds):
        wait()
        began = time.perf_counter()
        run()
        wait()
        times.append(1e3 * (time.perf_counter() - began))
    return min(times)


def measure(device, rehearse, keep):
    """keep(rows) is called after each operator."""
    rows = []
    for operator in FUNCTIONS:
        module = import_module(f"mamba_fsdp.ops.{operator}")
        exact, more = inputs(operator, TINY if rehearse else EXACT, device)
        expected = step(operator, "reference", exact, more, torch.float64)()
        for backend in OPERATORS[operator]:
            if BACKENDS[backend] in ("", device.type):
                rows.append(
                    {"operator": operator, "backend": backend}
                    | one_backend(
                        operator,
                        backend,
                        module.BACKENDS[backend],
                        exact,
                        more,
                        expected,
                        device,
                        rehearse,
                    )
                )
        keep(rows)


def one_backend(operator, backend, module, exact, more, expected, device, rehearse):
    reason = why_unavailable(operator, backend)
    if reason:
        return {"note": reason}
    row = {}
    try:
        for dtype in (torch.float32, torch.bfloat16):
            run = step(operator, backend, exact, more, dtype)
            first = run()
            row[f"error {str(dtype)[6:]}"] = f"{error(first, expected):.1e}"
            again = run()
            row["same bits"] = (
                "yes"
                if all(map(torch.equal, first, again)) and row.get("same bits") != "no"
                else "no"
            )
        large, more = inputs(operator, TINY if rehearse else LARGE, device)
        run = step(operator, backend, large, more, torch.bfloat16)
        row["ms forward + backward"] = f"{milliseconds(run, device, 1 if rehearse else 5):.3f}"
    except Exception as failure:
        row["note"] = (
            f"{type(failure).__name__}: {str(failure).splitlines()[0] if str(failure) else ''}"
        )
    return row
