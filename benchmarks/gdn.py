"""Compares the gated delta rule on the CPU with transformers' torch path: seconds and memory, forward and backward.

    python -m benchmarks.gdn [--length 2048] [--rounds 9]

The sizes are a layer's of Qwen3.5-0.8B: 16 heads of 128 channels, one row. Both norm queries and keys themselves. One
pass of each runs in turn, on one thread: ours as training.py runs it, transformers' as PyTorch comes. CPU seconds are
compared, which other programs disturb less than the clock's. Memory is what a pass adds to its process at the peak.
"""

import argparse
import statistics
from collections.abc import Callable
from functools import partial

import torch

from benchmarks.measure import steps_in_turn, table, times_as_fast
from mamba_fsdp.ops import cpp

HEADS = 16
CHANNELS = 128
SHIPPED = "transformers"


def make_pass(name: str, length: int) -> Callable[[], None]:
    """Returns a function that runs the operator forward and backward."""
    torch.set_num_threads(1)
    q, k, v = torch.randn(3, 1, length, HEADS, CHANNELS)
    g, beta = torch.rand(2, 1, length, HEADS)
    inputs = [value.requires_grad_() for value in (q, k, v, -g, beta)]
    if name == SHIPPED:
        from transformers.models.qwen3_5.modeling_qwen3_5 import torch_chunk_gated_delta_rule

        def operator(*inputs):
            return torch_chunk_gated_delta_rule(*inputs, use_qk_l2norm_in_kernel=True)[0]
    else:
        from mamba_fsdp.ops.gdn import gated_delta_rule as operator

        cpp.tune_process("cpu")

    def forward_and_backward() -> None:
        torch.autograd.grad(operator(*inputs).sum(), inputs)

    return forward_and_backward


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=9)
    given = parser.parse_args()
    makers = {name: partial(make_pass, name, given.length) for name in (SHIPPED, "reference")}
    taken = steps_in_turn(makers, given.rounds)
    seconds = {name: [step.cpu_seconds for step in steps] for name, steps in taken.items()}
    rows = []
    for name, steps in taken.items():
        row = {"path": name, "CPU seconds": f"{statistics.median(seconds[name]):.2f}"}
        row["x shipped"] = f"{times_as_fast(seconds[name], seconds[SHIPPED]):.1f}"
        row["MB of a pass"] = f"{steps[-1].peak - steps[-1].before:,}"
        rows.append(row)
    print(table(rows))


if __name__ == "__main__":
    main()
