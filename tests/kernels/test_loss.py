"""The loss's kernel beside the reference backend in float64: values, gradients, labels that don't count or can't be."""

import pytest
import torch
from compare import assert_like_reference, assert_same_bits, evaluate

from mamba_fsdp.ops.loss import linear_cross_entropy

# In bf16, logits and their gradient are rounded too.
MOST = {torch.float32: 1e-6, torch.bfloat16: 0.012}
DTYPES = pytest.mark.parametrize("dtype", MOST, ids=str)


def leaves(dtype=torch.float32, tokens=23, d_model=8, vocab=50):
    generator = torch.Generator().manual_seed(tokens + vocab)
    hidden = torch.randn(tokens, d_model, generator=generator)
    weight = torch.randn(vocab, d_model, generator=generator)
    labels = torch.randint(0, vocab, (tokens,), generator=generator)
    labels[::5] = -100
    return dict(hidden=hidden.to(dtype), weight=weight.to(dtype).float(), labels=labels)


def ours(hidden, weight, labels, **options):
    return 0.37 * linear_cross_entropy(hidden, weight, labels, backend="triton", **options)


def reference(hidden, weight, labels, **options):
    return 0.37 * linear_cross_entropy(hidden, weight, labels, **options)


@DTYPES
@pytest.mark.parametrize(
    "tokens, vocab, weighted", [(1, 1, False), (23, 50, True), (40, 64, False), (7, 4097, True)]
)
def test_equals_float64(dtype, tokens, vocab, weighted):
    """One block and several, full and not, several chunks; a label that does not count where they don't."""
    values = leaves(dtype, tokens, vocab=vocab)
    weights = None
    if weighted:
        weights = 3 * torch.rand(tokens, generator=torch.Generator().manual_seed(1))
    most = max(MOST[dtype], 1e-9 * vocab)  # a product over the vocabulary rounds on a CPU
    got = assert_like_reference(ours, reference, values, most, token_weights=weights, chunk=10)
    ignored = values["labels"] == -100
    assert (
        not got["gradient of hidden"][ignored].any()
        and got["gradient of weight"].dtype == torch.float32
    )
    assert got["gradient of hidden"].dtype == dtype and got["output 0"].dtype == torch.float32


def test_huge_logits_stay_finite_and_exact():
    values = leaves()
    values["hidden"] *= 1e4
    assert_like_reference(ours, reference, values, 1e-5)


def test_nothing_counted():
    values = leaves()
    values["labels"][:] = -100
    assert not any(result.any() for result in evaluate(ours, values).values())
    assert not any(result.any() for result in evaluate(ours, leaves(tokens=0)).values())


@pytest.mark.parametrize("label", [50, -1, 2**31 + 3])
def test_a_label_outside_the_vocabulary_makes_the_loss_and_the_gradient_nan(label):
    """For which the training loop refuses the step: without a word of the GPU, no kernel can raise there."""
    values = leaves()
    values["labels"][3] = label
    results = evaluate(ours, values)
    assert all(result.isnan().any() for result in results.values())
    assert results["gradient of weight"].isnan().all()


@pytest.mark.slow
def test_is_one_call_to_torch_compile():
    torch._dynamo.reset()
    values = leaves()

    def plain(hidden, weight, labels):
        return ours(hidden, weight, labels)

    compiled = torch.compile(plain, backend="aot_eager", fullgraph=True)
    assert_same_bits(evaluate(compiled, values), evaluate(ours, values))
