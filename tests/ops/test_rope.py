"""The frequencies of rotary positions, plain and scaled, equal those of transformers."""

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from mamba_fsdp.ops.rope import frequencies

LONGEST = "original_max_position_embeddings"
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, LONGEST: 64}
YARN = {"factor": 4.0, "beta_fast": 8.0, "beta_slow": 1.0, "attention_factor": 1.1, LONGEST: 640}


@pytest.mark.parametrize("length", [10, 40])
@pytest.mark.parametrize(
    "kind, numbers",
    [
        ("linear", {"factor": 4.0}),
        ("dynamic", {"factor": 4.0, LONGEST: 16}),
        ("llama3", LLAMA3),
        ("yarn", YARN),
        (
            "yarn",
            YARN | {"beta_fast": 1e4, "beta_slow": 1e-4},
        ),  # the limits are beyond the first and the last pair
        ("yarn", YARN | {"beta_fast": 101.0, "beta_slow": 101.0}),
    ],
)
def test_scaled_frequencies(kind, numbers, length):
    """Tests texts up to the original length and longer ones."""
    rope = {"rope_type": kind, "rope_theta": 100.0, **numbers}
    longest = numbers.get(LONGEST, 64)
    config = LlamaConfig(head_dim=32, max_position_embeddings=longest, rope_parameters=rope)
    expected, _ = ROPE_INIT_FUNCTIONS[kind](config, "cpu", seq_len=length)
    found = frequencies(32, 100.0, torch.device("cpu"), (kind, numbers), length)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-8)
