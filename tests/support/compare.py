"""Compares outputs and gradients of kernels with the reference backend in float64.

The error of a tensor is its largest difference from the expected tensor, divided by the largest value of the expected
tensor. Triton's interpreter truncates fp32 to bf16, so a result in bf16 can differ by a whole step of 2**-7.
"""

import torch

TOLERANCES = {torch.float32: 1e-6, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}


def is_float(leaf):
    return torch.is_tensor(leaf) and leaf.is_floating_point()


def evaluate(function, leaves, **rest):
    """Returns {"output 0": ..., "gradient of NAME": ...} of function(**leaves, **rest).

    The gradients belong to a fixed weighted sum of all outputs. Leaves without a floating dtype have no gradient.
    """
    wanted = [name for name, leaf in leaves.items() if is_float(leaf)]
    leaves = leaves | {name: leaves[name].detach().requires_grad_() for name in wanted}
    result = function(**leaves, **rest)
    outputs = [result] if torch.is_tensor(result) else [each for each in result if each is not None]
    total = 0
    for seed, output in enumerate(outputs):
        weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(seed))
        weights = weights.bfloat16().double()  # exact in every dtype of the outputs
        total = total + (output.double() * weights).sum()
    gradients = torch.autograd.grad(total, [leaves[name] for name in wanted])
    return {f"output {i}": output.detach() for i, output in enumerate(outputs)} | {
        f"gradient of {name}": gradient for name, gradient in zip(wanted, gradients)
    }


def double(leaves):
    return leaves | {name: leaf.double() for name, leaf in leaves.items() if is_float(leaf)}


def relative_error(got, expected):
    """Returns the largest difference between two tensors divided by the largest value of `expected`. The tensors can
    have any dtype. NaN counts as infinite."""
    assert got.shape == expected.shape, (got.shape, expected.shape)
    if not expected.numel():
        return 0.0
    difference = (
        got.double() - expected.double()
    ).abs().max() / expected.double().abs().max().clamp(min=1e-30)
    return float(difference.nan_to_num(nan=float("inf")))


def assert_like(got, expected, most=None):
    """Asserts that the relative error of every tensor of a dict is within its bound. most: a bound for all tensors, or
    {name: bound} for some of them. The bound of any other tensor is the value in TOLERANCES for its dtype."""
    assert got.keys() == expected.keys()
    errors = {name: relative_error(tensor, expected[name]) for name, tensor in got.items()}
    if isinstance(most, float):
        bounds = dict.fromkeys(got, most)
    else:
        bounds = {name: TOLERANCES[tensor.dtype] for name, tensor in got.items()} | (most or {})
    wrong = {name: error for name, error in errors.items() if not error <= bounds[name]}
    assert not wrong, f"relative errors above the bound: {wrong}; all: {errors}"


def assert_like_reference(kernels, reference, leaves, most=None, **rest):
    """Compares kernels(**leaves) with reference(**leaves in float64), outputs and gradients. Returns the results of
    `kernels`."""
    got = evaluate(kernels, leaves, **rest)
    assert_like(got, evaluate(reference, double(leaves), **rest), most)
    return got


def equal(first, second):
    """Returns whether two dicts of tensors are bitwise equal."""
    if first.keys() != second.keys():
        return False
    return all(torch.equal(first[name], second[name]) for name in first)
