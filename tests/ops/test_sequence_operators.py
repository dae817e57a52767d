"""Tests every operator along the sequence against its definition in float64.

tests/model/test_documents.py tests that documents do not influence each other.
"""

import sys
import types
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F

from mamba_fsdp.ops import cpp
from mamba_fsdp.ops.conv import causal_conv_silu
from mamba_fsdp.ops.gdn import gated_delta_rule
from mamba_fsdp.ops.scan import selective_scan
from mamba_fsdp.ops.ssd import ssd, weighted_ssd
from mamba_fsdp.ops.ssd.entering import decays_from_start, output_of_state
from tests.support.compare import assert_like, double, equal, evaluate
from tests.support.definitions import delta_recurrence, loop, random_documents, recurrence
from tests.support.memory import LargestTensor

pytestmark = pytest.mark.torch22


def convolution(x, weight, bias, seq_idx=None):
    out = bias
    for shift in range(weight.shape[2]):
        earlier = F.pad(x, (0, 0, shift, 0))[:, : x.shape[1]]
        if seq_idx is not None:
            document = F.pad(seq_idx, (shift, 0), value=-1)[:, : x.shape[1]]
            earlier = earlier * (document == seq_idx).unsqueeze(2)
        out = out + earlier * weight[:, 0, -1 - shift]
    return F.silu(out)


def weighted_recurrence(x, decay, weight, B, C, initial_state, seq_idx=None):
    """Computes the recurrence of Mamba-3 with the recurrence of Mamba-2: x is multiplied by the quotient of weight
    and decay."""
    zeros = decay.new_zeros(decay.shape[2])
    dt = torch.log(torch.expm1(decay))
    scaled = x * (weight / decay).unsqueeze(3)
    return recurrence(scaled, dt, zeros - 1, B, C, zeros, zeros, seq_idx, initial_state)


class Operator(NamedTuple):
    function: Callable
    definition: Callable
    inputs: str  # "NAME=dimensions ...", where each dimension is a letter of SIZES


OPERATORS = {
    "conv": Operator(causal_conv_silu, convolution, "x=btc weight=c1w bias=c"),
    "scan": Operator(
        partial(selective_scan, return_last_state=True),
        loop,
        "u=btc dt=btc A=cn B=btn C=btn D=c z=btc dt_bias=c initial_state=bcn",
    ),
    "ssd": Operator(
        partial(ssd, chunk_size=256, return_last_state=True),
        recurrence,
        "x=bthp dt=bth A=h B=btgn C=btgn D=h dt_bias=h initial_state=bhpn",
    ),
    "weighted ssd": Operator(
        partial(weighted_ssd, chunk_size=256, return_last_state=True),
        weighted_recurrence,
        "x=bthp decay=bth weight=bth B=btgn C=btgn initial_state=bhpn",
    ),
    "gdn": Operator(
        partial(gated_delta_rule, return_last_state=True),
        delta_recurrence,
        "q=btgn k=btgn v=bthp g=bth beta=bth initial_state=bhnp",
    ),
}
# The sizes of the dimensions: b batch, t positions, c channels, w convolution width, h heads, p channels of a head, g
# groups of heads, n states.
SIZES = {"b": 2, "t": 70, "c": 5, "w": 4, "h": 4, "p": 3, "g": 2, "n": 5, "1": 1}
RANGES = {
    "A": lambda t: -t.exp(),
    "g": lambda t: -t.exp(),
    "dt": lambda t: t - 2,
    "beta": lambda t: 2 * t.sigmoid(),
    "decay": torch.sigmoid,
    "weight": torch.sigmoid,
}
FORMS = [(name, "reference") for name in OPERATORS]
IN_C = [] if cpp.why_unavailable() else [("conv", "cpp"), ("scan", "cpp")]
each_form = pytest.mark.parametrize("operator, backend", FORMS + IN_C)


def draw(operator, dtype=torch.float64, **sizes):
    """Returns {name: random input} of an operator. Parameters, states and the inputs of decays have at least fp32."""
    sizes = SIZES | sizes
    generator = torch.Generator().manual_seed(0)
    values = {}
    for item in OPERATORS[operator].inputs.split():
        name, letters = item.split("=")
        shape = [sizes[letter] for letter in letters]
        value = torch.randn(shape, generator=generator, dtype=torch.float64)
        if name in RANGES:
            value = RANGES[name](value)
        is_activation = "t" in letters and name not in ("g", "beta", "decay", "weight")
        kept = dtype if is_activation else torch.promote_types(dtype, torch.float32)
        values[name] = value.to(kept)
    return values


def compare(operator, backend, values, most, **how):
    found = evaluate(OPERATORS[operator].function, values, backend=backend, **how)
    assert_like(found, evaluate(OPERATORS[operator].definition, double(values), **how), most)
    return found


@each_form
@pytest.mark.parametrize("kind", ["whole", "documents", "deterministic"])
@pytest.mark.parametrize(
    "t, g, w",
    [(1, 1, 4), (3, 2, 9), (15, 4, 1), (16, 2, 2), (17, 2, 4), (64, 1, 2), (65, 4, 9), (150, 2, 4)],
)
def test_equals_its_definition(operator, backend, kind, t, g, w, monkeypatch):
    """Outputs, last state and all gradients equal the definition, at the edges of chunks, with and without documents,
    and for several groups and widths.

    Deterministic mode must not use cumsum, because torch raises an error for it on a GPU.
    """
    if kind == "deterministic":
        monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    seq_idx = random_documents(2, t) if kind == "documents" else None
    compare(operator, backend, draw(operator, t=t, g=g, w=w), 1e-11, seq_idx=seq_idx)


@each_form
def test_half_precision_is_as_exact_as_its_storage(operator, backend):
    """With inputs in bf16, the error is close to the rounding error of outputs and gradients, because inner
    computations are in float32."""
    values = draw(operator, torch.bfloat16, t=300, c=20)
    found = compare(operator, backend, values, 2.0**-7, seq_idx=random_documents(2, 300))
    assert found["output 0"].dtype == torch.bfloat16


@pytest.mark.parametrize(
    "operator, name, factor, shift",
    [
        ("scan", "dt", 5, -40),
        ("scan", "dt", 30, 3),
        ("scan", "dt", 300, 1000),
        ("ssd", "dt", 1, -60),
        ("ssd", "dt", 1, 5),
        ("ssd", "dt", 1, 20000),
        ("gdn", "g", 1e-6, 0),
        ("gdn", "g", 300, 0),
    ],
)
def test_extreme_decays(operator, name, factor, shift):
    """Decays that are close to 1 or to 0 give correct results and finite gradients in float32."""
    values = draw(operator, torch.float32, t=300)
    values[name] = values[name] * factor + shift
    for name, backend in FORMS + IN_C:
        if name == operator:
            compare(operator, backend, values, 3e-5)


LAYOUTS = {
    "of wider rows": lambda t: torch.cat([t, t], -1)[..., : t.shape[-1]],
    "of longer rows": lambda t: torch.cat([t, t], 1)[:, : t.shape[1]],
    "channels first": lambda t: t.transpose(1, 2).contiguous().transpose(1, 2),
}


@each_form
@pytest.mark.parametrize("layout", LAYOUTS)
def test_inputs_can_have_any_strides(operator, backend, layout):
    values = draw(operator)
    for name, value in values.items():
        if value.dim() > 2:
            values[name] = LAYOUTS[layout](value)
    compare(operator, backend, values, 1e-11)


@each_form
def test_nan_is_not_hidden(operator, backend):
    """A NaN in any input reaches an output, where the check of the loss can find it."""
    for name in draw(operator):
        values = draw(operator)
        values[name].view(-1)[0] = float("nan")
        found = evaluate(OPERATORS[operator].function, values, backend=backend)
        assert found["output 0"].isnan().any(), name


@pytest.mark.parametrize("operator, backend", IN_C)
def test_results_in_c_do_not_depend_on_threads(operator, backend):
    values = draw(operator, torch.float32, b=3, c=300)
    threads = torch.get_num_threads()
    results = []
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            results.append(evaluate(OPERATORS[operator].function, values, backend=backend))
    finally:
        torch.set_num_threads(threads)
    assert equal(*results)


@each_form
def test_memory_is_linear_without_states(operator, backend):
    """No operator creates a tensor with a state for each position, which would be more than 12 times as large as the
    inputs. The tensors that an operator saves for the backward pass are less than 6 times as large as the inputs."""
    values = draw(operator, torch.float32, t=1024, c=64, n=64, h=4, p=16)
    for value in values.values():
        value.requires_grad_()
    kept = {}

    def keep(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with LargestTensor() as largest:
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            y, *_ = OPERATORS[operator].function(**values, backend=backend)
        y.sum().backward()
    given = sum(value.nbytes for value in values.values())
    assert sum(kept.values()) < 6 * given and largest.bytes < 2 * given


def test_a_part_without_a_state_plus_the_output_of_its_state_equals_the_whole():
    values = draw("ssd")
    del values["initial_state"]
    whole = ssd(**values, chunk_size=64)
    first, second = (
        {name: value[:, span] if value.dim() > 1 else value for name, value in values.items()}
        for span in (slice(0, 30), slice(30, 70))
    )
    y, state = ssd(**first, chunk_size=64, return_last_state=True)
    decays = decays_from_start(second["dt"], second["A"], second["dt_bias"])
    entering = output_of_state(second["C"], state, decays)
    parts = [y, ssd(**second, chunk_size=64) + entering]
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("bounded", [False, True])
def test_the_call_of_flash_linear_attention(monkeypatch, bounded):
    """The fused backend passes all documents to flash-linear-attention in a single row, together with their boundaries.
    With documents, it refuses an initial state, and it refuses to return the last state. In this test, a function with
    the same parameters replaces the library."""

    def chunk_gated_delta_rule(
        q, k, v, g, beta, *, initial_state, output_final_state, use_qk_l2norm_in_kernel, cu_seqlens
    ):
        assert use_qk_l2norm_in_kernel
        seq_idx = None
        if bounded:
            positions = torch.arange(q.shape[1])[None]
            seq_idx = torch.bucketize(positions, cu_seqlens, right=True)
        y, last = delta_recurrence(q, k, v, g, beta, seq_idx, initial_state)
        return y, last if output_final_state else None

    module = types.ModuleType("fla.ops.gated_delta_rule")
    module.chunk_gated_delta_rule = chunk_gated_delta_rule
    for name in ("fla", "fla.ops", module.__name__):
        monkeypatch.setitem(sys.modules, name, module)
    values = draw("gdn")
    if not bounded:
        compare("gdn", "fused", values, 1e-11)
        return
    seq_idx = random_documents(2, 70)
    state = {"initial_state": values.pop("initial_state")}
    for refused in (state, {"return_last_state": True}):
        with pytest.raises(AssertionError, match="each document has a state"):
            gated_delta_rule(**values, seq_idx=seq_idx, backend="fused", **refused)
    found, expected = (
        evaluate(gated_delta_rule, values, seq_idx=seq_idx, backend=backend)
        for backend in ("fused", "reference")
    )
    assert_like(found, expected, 1e-11)
