"""Computes the frequencies of rotary positions: Su et al. 2021 (arXiv 2104.09864), and scalings of them for texts
longer than a model was first trained on, as transformers computes them.

    linear    positions are divided by `factor`
    dynamic   theta grows for texts longer than the original length (NTK-aware)
    llama3    channel pairs that turn less than low_freq_factor times within the original length become `factor` times
              slower, pairs that turn more than high_freq_factor times keep their frequency, and pairs in between are
              blended (Llama 3.1)
    yarn      as llama3, but the pairs that turn beta_fast and beta_slow times are the limits, and the blend in between
              is linear in the index of the pair; also, cosines and sines are multiplied by attention_factor (Peng et
              al. 2023, arXiv 2309.00071)
"""

import math

import torch
from torch import Tensor


def frequencies(
    rotary_dim: int, theta: float, device: torch.device, scaling: tuple, length: int
) -> Tensor:
    """Returns the angle by which each pair of channels turns per position, as an fp32 tensor (rotary_dim / 2).

    scaling: (kind, {name of a parameter in transformers: value}); the kind is "" without scaling. length: the length of
    the text so far, for the dynamic scaling."""
    kind, values = scaling
    original = values.get("original_max_position_embeddings")
    factor = values.get("factor")
    if kind == "dynamic":
        stretched = factor * max(length, original) / original - (factor - 1)
        theta = theta * stretched ** (rotary_dim / (rotary_dim - 2))
    exponents = torch.arange(0, rotary_dim, 2, device=device).float() / rotary_dim
    plain = 1.0 / theta**exponents
    if kind == "linear":
        return plain / factor
    if kind == "llama3":
        low = values["low_freq_factor"]
        turns = original * plain / (2 * math.pi)
        kept = (turns - low) / (values["high_freq_factor"] - low)
    elif kind == "yarn":
        first, last = (
            rotary_dim * math.log(original / (values[name] * 2 * math.pi)) / (2 * math.log(theta))
            for name in ("beta_fast", "beta_slow")
        )
        first = max(math.floor(first), 0)
        last = min(math.ceil(last), rotary_dim - 1)
        order = torch.arange(rotary_dim // 2, device=device).float()
        kept = 1 - (order - first) / max(last - first, 0.001)
    else:
        return plain
    kept = kept.clamp(0, 1)
    return plain / factor * (1 - kept) + plain * kept
