"""Activation checkpointing and compiling, block by block, without renaming anything in the model."""

from collections.abc import Sequence
from fractions import Fraction

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from mamba_fsdp.ops import conv, scan


def checkpoint_blocks(blocks: Sequence[nn.Module], share: Fraction, *, reentrant: bool) -> None:
    """Let a share in [0, 1] of the blocks recompute their activations in the backward pass."""
    for block, chosen in zip(blocks, selected(len(blocks), share)):
        if chosen:
            block.forward = _checkpointed(block.forward, reentrant)


def selected(count: int, share: Fraction) -> list[bool]:
    """Which of `count` blocks recompute: block i (from 1) when i * share reaches 0.5, 1.5, 2.5, … (as fms-fsdp)."""
    reached = [(index * share + Fraction(1, 2)) // 1 for index in range(count + 1)]
    return [before < after for before, after in zip(reached, reached[1:])]


def compile_blocks(blocks: Sequence[nn.Module]) -> None:
    """Compile each block's forward by itself, so that sharding stays outside of it.

    Equal blocks share what is compiled; torch 2.2 compiles each one, and beyond 8 would run the rest uncompiled.
    """
    import torch._dynamo  # seconds of imports that only this needs

    leave_uncompiled()
    for limit in ("cache_size_limit", "accumulated_cache_size_limit"):
        setattr(torch._dynamo.config, limit, max(8 * len(blocks), getattr(torch._dynamo.config, limit)))
    for block in blocks:
        block.forward = torch.compile(block.forward)


def leave_uncompiled() -> None:
    """Keep C, and the scan's loop over positions, out of graphs: calls of their own within a compiled block."""
    for module, name in ((conv.FORMS["native"], "causal_conv_silu"), (scan.FORMS["native"], "selective_scan"),
                         (scan.FORMS["portable"], "selective_scan")):
        setattr(module, name, torch.compiler.disable(getattr(module, name)))  # here, as it takes seconds of imports


def _checkpointed(forward, reentrant):
    def run(*inputs):
        if not torch.is_grad_enabled():
            return forward(*inputs)
        return checkpoint(forward, *inputs, use_reentrant=reentrant, preserve_rng_state=False)  # nothing random inside
    return run
