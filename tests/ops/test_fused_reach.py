"""mamba-ssm's kernels compute addresses in 32 bits: where a batch is larger, they are passed over, or refused."""

import pytest
import torch

from mamba_fsdp.errors import UserError
from mamba_fsdp.ops import fused
from mamba_fsdp.ops.backends import resolve_backends
from tests.support.tiny import resolved

MAMBA2_27B = 10_576  # rows of in_proj


@pytest.mark.parametrize("batch_size, is_fused", [(32, True), (64, False)])
def test_training_passes_them_over_if_a_batch_is_too_large(batch_size, is_fused):
    """64 x 4,096 tokens of mamba2-2.7b's input projection have 2.8e9 elements."""
    settings = resolved(model_name="mamba2-2.7b", batch_size=batch_size, seq_length=4096)
    uses = settings.operator_uses("cuda")
    faster = dict.fromkeys(uses, "fused")
    assumed = ("fused", "triton")
    choice = resolve_backends("auto", "cuda", uses, assumed, preferred=faster)
    assert ("2^31 elements" not in str(choice)) == is_fused
    assert (choice.backends["mamba2"] == "fused") == is_fused


def test_a_call_refuses_what_their_addresses_do_not_reach():
    """By the distance of elements, whatever the size: a slice of a projection is spread over all of it."""
    for tokens, reaches in ((203_000, True), (203_100, False)):
        x = torch.empty(1, tokens, MAMBA2_27B, device="meta")[..., :64]
        if reaches:
            fused.check_reach(x)
        else:
            with pytest.raises(UserError, match="1 x 203,100 tokens .* reach 2.31: take fewer"):
                fused.check_reach(x)
