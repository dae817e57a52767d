"""The chunked output layer and loss against PyTorch's own, in value, gradients and memory."""

import pytest
import torch
import torch.nn.functional as F

from mamba_fsdp.model.config import ModelConfig
from mamba_fsdp.ops.backends import REFERENCE
from mamba_fsdp.ops.loss import linear_cross_entropy
from mamba_fsdp.planning.passes import measure
from mamba_fsdp.settings.train_config import TrainConfig
from tests.support.compare import assert_like, double, evaluate
from tests.support.memory import LargestTensor


def inputs(tokens=23, d_model=6, vocab=11, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, d_model, generator=generator, dtype=torch.float64).to(dtype)
    weight = torch.randn(vocab, d_model, generator=generator, dtype=torch.float64).to(dtype)
    labels = torch.randint(0, vocab, (tokens,), generator=generator)
    labels[::5] = -100
    return hidden.requires_grad_(), weight.requires_grad_(), labels


@pytest.mark.parametrize("tokens", [0, 6])
def test_nothing_counted(tokens):
    """No counted token: a loss of 0 and gradients of 0, never NaN."""
    hidden, weight, labels = inputs(tokens=tokens)
    loss = linear_cross_entropy(hidden, weight, torch.full_like(labels, -100))
    loss.backward()
    assert loss == 0 and not hidden.grad.any() and not weight.grad.any()


def test_huge_logits_stay_finite():
    hidden, weight, labels = inputs(dtype=torch.float32)
    loss = linear_cross_entropy(hidden * 1e6, weight, labels)
    loss.backward()
    assert loss.isfinite() and hidden.grad.isfinite().all()


@pytest.mark.torch22
@pytest.mark.parametrize(
    "dtype, tolerance",
    [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 0.02)],
    ids=str,
)
@pytest.mark.parametrize("chunk", [7, 40, 100])
@pytest.mark.parametrize("weighted", [False, True])
def test_equals_cross_entropy(dtype, tolerance, chunk, weighted, monkeypatch):
    """Value and gradients are those of float64, also of weights from 0 to 3; a label that is ignored stays so. Nor does
    it matter whether the run is deterministic, or gradients are wanted."""
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: chunk == 40)
    hidden, weight, labels = inputs(tokens=40, d_model=8, dtype=dtype)
    weights = 3 * torch.rand(40, generator=torch.Generator().manual_seed(1))
    weights[::3] = 0

    def definition(hidden, weight):
        losses = F.cross_entropy(hidden @ weight.T, labels, reduction="none")
        return (losses * weights if weighted else losses).sum()

    leaves = {"hidden": hidden, "weight": weight}
    how = {"labels": labels, "token_weights": weights if weighted else None, "chunk": chunk}
    found = evaluate(linear_cross_entropy, leaves, **how)
    assert_like(found, evaluate(definition, double(leaves)), tolerance)
    with torch.no_grad():
        assert linear_cross_entropy(**leaves, **how) == found["output 0"]


@pytest.mark.parametrize("label", [11, 1000, -1])
def test_labels_outside_the_vocabulary_are_refused(label):
    hidden, weight, labels = inputs()
    labels[3] = label
    with pytest.raises((RuntimeError, IndexError)):
        linear_cross_entropy(hidden, weight, labels)


@pytest.mark.torch22
@pytest.mark.parametrize(
    "dtype, factor", [(torch.bfloat16, 1 / 16300), (torch.float16, 1 / 3_000_000)], ids=str
)
@pytest.mark.parametrize("weight_dtype", [None, torch.float32], ids=str)
def test_the_factor_before_the_loss_is_not_rounded(dtype, factor, weight_dtype):
    """Half-precision gradients are those of float64 times the factor, whatever of it the dtype could hold.

    Their own rounding errs to both sides; measured is what they are too long or too short by as a whole.
    """
    hidden, weight, labels = inputs(tokens=400, d_model=16, vocab=50, dtype=dtype)
    hidden, weight = (4 * value.detach() for value in (hidden, weight))
    weight = weight.to(weight_dtype or dtype)
    exact = [value.double().requires_grad_() for value in (hidden, weight)]
    expected = torch.autograd.grad(
        F.cross_entropy(exact[0] @ exact[1].T, labels, reduction="sum") * factor, exact
    )
    ours = [value.requires_grad_() for value in (hidden, weight)]
    actual = torch.autograd.grad(linear_cross_entropy(*ours, labels, chunk=100) * factor, ours)
    for a, e in zip(actual, expected):
        assert abs((a.double() * e).sum() / (e * e).sum() - 1) < 1e-3


def test_logits_of_one_chunk_at_a_time():
    hidden, weight, labels = inputs(tokens=512, d_model=4, vocab=300)
    with LargestTensor() as largest:
        linear_cross_entropy(hidden, weight, labels, chunk=16).backward()
    assert largest.bytes <= 16 * 300 * 8


def test_a_gpu_has_larger_chunks_which_the_plan_counts():
    """Four times the logits exist at a time, in fp32 and in bf16."""
    settings = TrainConfig(ModelConfig(layers="mamba2", d_model=16, headdim=16, vocab_size=5000))
    settings = settings.changed(mixed_precision="bf16", batch_size=5, seq_length=1000)
    on_cpu, on_gpu = (measure(settings, REFERENCE, False, kind).loss for kind in ("cpu", "cuda"))
    assert on_gpu - on_cpu == pytest.approx((4096 - 1024) * 5000 * 6, rel=0.05)
