"""Tests MambaLM, the whole model: its loss, precision, construction and compilation."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F

from mamba_fsdp.model.lm import MambaLM
from mamba_fsdp.model.spec import parameters
from mamba_fsdp.parallel.parallelize import compile_blocks
from tests.support.models import FAMILIES, small_model, some_tokens

pytestmark = pytest.mark.torch22
# Recorded losses of the models that tests/interop compares with other libraries.
LOSSES = {
    "mamba1": 193.712954,
    "mamba2": 194.838038,
    "mamba3": 193.152919,
    "gdn": 195.658329,
    "hybrid": 195.221914,
    "llama": 203.390115,
    "hybrids": 198.676950,
    "everything": 195.617934,
}


def loss_and_gradients(model, tokens, seq_idx=None):
    loss = model(tokens[:, :-1], labels=tokens[:, 1:], seq_idx=seq_idx)
    names, parameters = zip(*model.named_parameters())
    return loss, dict(zip(names, torch.autograd.grad(loss, parameters)))


def assert_gradients_close(found, expected, tolerance):
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert (found[name] - gradient).norm() <= tolerance * gradient.norm(), name


@pytest.mark.parametrize("family", FAMILIES)
def test_the_loss_is_the_sum_of_cross_entropies_of_the_logits(family):
    """The loss and its gradients equal those of torch's cross_entropy of the logits, summed over the labels that are
    not ignored. The loss also equals the recorded one."""
    model = small_model(family, compute_dtype=torch.float64).double()
    tokens = some_tokens(3, 20)
    labels = some_tokens(3, 20, seed=1)
    labels[:, 5:9] = -100
    loss = model(tokens, labels=labels)
    expected = F.cross_entropy(
        model(tokens).flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum"
    )
    torch.testing.assert_close(loss, expected)
    assert loss.item() == pytest.approx(LOSSES[family], rel=1e-7)
    parameters = list(model.parameters())
    for found, gradient in zip(
        torch.autograd.grad(loss, parameters), torch.autograd.grad(expected, parameters)
    ):
        torch.testing.assert_close(found, gradient, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("family", FAMILIES)
def test_bf16_is_close_to_fp32_and_keeps_the_residual_stream_in_fp32(family):
    tokens = some_tokens(4, 33)
    exact, exact_gradients = loss_and_gradients(small_model(family), tokens)
    model = small_model(family, compute_dtype=torch.bfloat16)
    residuals = []
    for block in model.backbone.layers:
        block.register_forward_hook(lambda block, inputs, outputs: residuals.append(outputs))
    loss, gradients = loss_and_gradients(model, tokens)
    assert loss.dtype == torch.float32 and loss.item() == pytest.approx(exact.item(), rel=2e-3)
    assert {hidden.dtype for hidden, _ in residuals} == {torch.bfloat16}
    assert {residual.dtype for _, residual in residuals} == {torch.float32}
    assert all(gradient.dtype == torch.float32 for gradient in gradients.values())
    # The norm of Gated DeltaNet divides by the root mean square of its input, which is small if q . k is small. The
    # division increases rounding errors.
    tolerance = 0.3 if family == "gdn" else 0.1
    assert_gradients_close(gradients, exact_gradients, tolerance)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_constructor_draws_no_random_numbers_and_needs_no_memory_on_meta(family):
    config = FAMILIES[family]
    before = torch.get_rng_state()
    with torch.device("meta"):
        model = MambaLM(config)
    MambaLM(config)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(parameter.is_meta for parameter in model.parameters()) and not list(model.buffers())
    found = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    assert list(found.items()) == [
        (name, parameter.shape) for name, parameter in parameters(config).items()
    ]
    assert (model.lm_head.weight is model.backbone.embedding.weight) == config.tie_embeddings


@pytest.mark.slow
def test_compiled_blocks_compute_the_same(monkeypatch):
    """Compiled blocks of each mixer have the loss and gradients of uncompiled ones, also with document boundaries.

    The backend is not Inductor, which needs half a minute per block. tests/parallel/test_strategies.py compiles a block
    with Inductor.
    """
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    # Earlier compilations with other sizes would make these sizes dynamic, and torch 2.2 compiles dynamic sizes
    # wrongly.
    torch._dynamo.reset()
    tokens = some_tokens(2, 40)
    seq_idx = (torch.arange(39) >= 13).int().expand(2, -1)
    model = small_model("everything", reset_at_documents=True)
    expected, expected_gradients = loss_and_gradients(model, tokens, seq_idx)
    compile_blocks(model.backbone.layers)
    loss, gradients = loss_and_gradients(model, tokens, seq_idx)
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=0)
    assert_gradients_close(gradients, expected_gradients, tolerance=1e-4)
