"""Compares the gated delta rule on the CPU with transformers' torch path: seconds and memory, forward and backward.

    python -m benchmarks.gdn [--length 2048] [--rounds 9] [--threads 1]

The sizes are a layer's of Qwen3.5-0.8B: 16 heads of 128 channels, one row. Both norm queries and keys themselves. One
pass of each runs in turn, first as PyTorch comes ("shipped"), then with what training.py sets (cpp.tune_process). The
medians of CPU seconds are compared, which other programs disturb less than the clock's. Memory is what a process of
its own holds at its peak beyond what it held before the first pass.
"""

import argparse
import subprocess
import sys

import torch

from benchmarks.measure import print_memory, time_in_turn
from mamba_fsdp.ops import cpp

HEADS = 16
CHANNELS = 128
NAMES = ("reference", "transformers")


def make_pass(name, length):
    """Returns a function that runs the operator forward and backward."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 1, length, HEADS, CHANNELS, generator=generator)
    g, beta = torch.rand(2, 1, length, HEADS, generator=generator)
    inputs = [value.requires_grad_() for value in (q, k, v, -g, beta)]
    if name == "reference":
        from mamba_fsdp.ops.gdn import gated_delta_rule as operator
    else:
        from transformers.models.qwen3_5.modeling_qwen3_5 import torch_chunk_gated_delta_rule

        def operator(*inputs):
            return torch_chunk_gated_delta_rule(*inputs, use_qk_l2norm_in_kernel=True)[0]

    def forward_and_backward():
        torch.autograd.grad(operator(*inputs).sum(), inputs)

    return forward_and_backward


def memory(name, arguments):
    """Returns the megabytes of a process that runs only `name`."""
    command = [sys.executable, "-m", "benchmarks.gdn", f"--length={arguments.length}"]
    command += [f"--threads={arguments.threads}", f"--memory_of={name}"]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    before, peak = map(int, done.stdout.split()[-2:])
    return peak - before


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--memory_of", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    if arguments.memory_of:
        if arguments.memory_of == "reference":
            cpp.tune_process("cpu")
        return print_memory(make_pass(arguments.memory_of, arguments.length))
    passes = {name: make_pass(name, arguments.length) for name in NAMES}
    print(f"torch {torch.__version__}, {arguments.threads} threads, {arguments.length} tokens")
    time_in_turn(passes, 1)
    as_comes = time_in_turn(passes, arguments.rounds)
    cpp.tune_process("cpu")
    time_in_turn(passes, 1)
    tuned = time_in_turn(passes, arguments.rounds)
    _, shipped = as_comes["transformers"]
    print("path            CPU seconds   x shipped   tuned seconds   x shipped   MB of a pass")
    for name in NAMES:
        (_, before), (_, after) = as_comes[name], tuned[name]
        rates = f"{before:11.3f}   {shipped / before:9.2f}   {after:13.3f}   {shipped / after:9.2f}"
        print(f"{name:14}  {rates}   {memory(name, arguments):12}", flush=True)


if __name__ == "__main__":
    main()
