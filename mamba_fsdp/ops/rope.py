"""How fast rotary positions turn: Su et al. 2021 (arXiv 2104.09864), and scaled for longer texts than a model was first
trained on, as transformers computes it.

    linear    positions divided by `factor`
    dynamic   a larger theta for texts longer than the original length (NTK-aware)
    llama3    pairs that turn less than low_freq_factor times within the original length `factor` times slower, those
              that turn more than high_freq_factor times as they were, a blend between (Llama 3.1)
    yarn      alike, by the pairs' order between those that turn beta_fast and beta_slow times, and cosines and sines
              times attention_factor (Peng et al. 2023, arXiv 2309.00071)
"""

import math

import torch
from torch import Tensor


def frequencies(
    rotary_dim: int, theta: float, device: torch.device, scaling: tuple, length: int
) -> Tensor:
    """What each pair of channels turns by per position (rotary_dim / 2) fp32. scaling: the kind ("" for none) and its
    numbers by transformers' names; length: of the text so far, which the dynamic one reads."""
    kind, numbers = scaling
    original = numbers.get("original_max_position_embeddings")
    factor = numbers.get("factor")
    if kind == "dynamic":
        stretched = factor * max(length, original) / original - (factor - 1)
        theta = theta * stretched ** (rotary_dim / (rotary_dim - 2))
    exponents = torch.arange(0, rotary_dim, 2, device=device).float() / rotary_dim
    plain = 1.0 / theta**exponents
    if kind == "linear":
        return plain / factor
    if kind == "llama3":
        low = numbers["low_freq_factor"]
        turns = original * plain / (2 * math.pi)
        kept = (turns - low) / (numbers["high_freq_factor"] - low)
    elif kind == "yarn":
        first, last = (
            rotary_dim * math.log(original / (numbers[name] * 2 * math.pi)) / (2 * math.log(theta))
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
