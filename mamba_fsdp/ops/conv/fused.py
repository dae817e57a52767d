"""The causal convolution by causal-conv1d."""

from mamba_fsdp.ops import fused

why_unavailable = fused.need("causal_conv1d")
VARIES = "causal-conv1d before 1.6 adds with atomics, and later ones are not measured"


def takes(use):
    return f"causal-conv1d takes multiples of 8 channels, not {use.channels}" if use.channels % 8 else None


def causal_conv_silu(x, weight, bias, documents):
    from causal_conv1d import causal_conv1d_fn

    if x.stride(1) % 8:  # between positions it takes multiples of 8 elements only
        x = x.contiguous()
    return causal_conv1d_fn(x.transpose(1, 2), weight.squeeze(1).to(x.dtype), bias.to(x.dtype),
                            seq_idx=fused.seq_idx(documents), activation="silu").transpose(1, 2)
