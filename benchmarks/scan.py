"""Compares a whole training step of Mamba-1 on the CPU with transformers' model of the same size: tokens/s, peak
memory.

    python -m benchmarks.scan [--size tiny --size small] [--rounds 7] [--threads 2] [--vocab_size 1024] [--plain]

Every backend takes the same step (forward, loss, backward, AdamW) on the same batch in one process, one step of each in
turn, and the medians are compared: first as PyTorch comes, then with what training.py sets at its start
(cpp.tune_process). Peak memory is measured in a process of its own per backend. --plain adds transformers' loop without
mambapy; one of its steps takes minutes at `small`.
"""

import argparse
import importlib.util
import subprocess
import sys

import torch

from benchmarks.measure import print_memory, time_in_turn, training_step
from mamba_fsdp.model.config import ModelConfig
from mamba_fsdp.ops import cpp
from mamba_fsdp.ops.backends import resolve_backends

SIZES = {  # d_model, layers, length, batch
    "tiny": (128, 4, 256, 8),
    "small": (256, 8, 512, 4),
}
OURS = {
    "reference": torch.float32,
    "cpp": torch.float32,
    "reference bf16": torch.bfloat16,
    "cpp bf16": torch.bfloat16,
}
THEIRS = {"transformers mambapy": True, "transformers plain": False}


def transformers_loss(size, vocab_size, use_mambapy):
    from transformers import MambaConfig, MambaForCausalLM

    d_model, n_layer, _, _ = SIZES[size]
    model = MambaForCausalLM(
        MambaConfig(
            vocab_size=vocab_size,
            hidden_size=d_model,
            num_hidden_layers=n_layer,
            use_mambapy=use_mambapy,
            use_cache=False,
            tie_word_embeddings=True,
        )
    )
    return model, lambda tokens: model(input_ids=tokens, labels=tokens).loss


def our_loss(size, vocab_size, backend, layers):
    from mamba_fsdp.model.init import initial_part
    from mamba_fsdp.model.lm import MambaLM
    from mamba_fsdp.model.spec import operator_uses, parameters

    d_model, n_layer, length, batch = SIZES[size]
    config = ModelConfig(layers=layers, d_model=d_model, n_layer=n_layer, vocab_size=vocab_size)
    dtype = OURS.get(backend, torch.float32)
    choice = resolve_backends(backend.split()[0], "cpu", operator_uses(config, dtype))
    model = MambaLM(config, backends=choice.backends, compute_dtype=dtype)
    with torch.no_grad():
        for (name, described), parameter in zip(parameters(config).items(), model.parameters()):
            value = initial_part(name, described, 0, 0, described.size)
            parameter.copy_(value.view(described.shape))
    return model, lambda tokens: model(tokens[:, :-1], tokens[:, 1:]) / (batch * length)


def make_step(size, vocab_size, backend, layers="mamba1"):
    """Returns a function that takes one training step and returns its loss."""
    if backend in THEIRS:
        model, loss_of = transformers_loss(size, vocab_size, THEIRS[backend])
    else:
        model, loss_of = our_loss(size, vocab_size, backend, layers)
    _, _, length, batch = SIZES[size]
    more = backend not in THEIRS  # theirs shifts the labels itself
    tokens = torch.randint(
        0, vocab_size, (batch, length + more), generator=torch.Generator().manual_seed(0)
    )
    return training_step(model, loss_of, tokens)


def measure_memory(size, vocab_size, backend):
    if backend not in THEIRS:
        cpp.tune_process("cpu")
    print_memory(make_step(size, vocab_size, backend), 1 if backend == "transformers plain" else 3)


def memory(size, vocab_size, backend, threads):
    command = [
        sys.executable,
        "-m",
        "benchmarks.scan",
        f"--size={size}",
        f"--vocab_size={vocab_size}",
        f"--threads={threads}",
        f"--memory_of={backend}",
    ]
    return map(
        int, subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    )


def compare(size, vocab_size, backends, rounds, threads):
    d_model, n_layer, length, batch = SIZES[size]
    print(
        f"\n{size}: d_model {d_model}, {n_layer} layers, {length} tokens, batch {batch}, vocabulary {vocab_size}"
    )
    steps = {backend: make_step(size, vocab_size, backend) for backend in backends}
    for backend, step in steps.items():
        if backend != "transformers plain":
            step()
    plain = steps.pop("transformers plain", None)
    as_comes = time_in_turn(steps, rounds)
    if plain:
        as_comes |= time_in_turn({"transformers plain": plain}, 1)
    shipped = min(as_comes[backend][0] for backend in backends if backend in THEIRS)
    cpp.tune_process("cpu")
    for step in steps.values():
        step()
    tuned = time_in_turn(steps, rounds)
    print(
        "backend                    tokens/s   x shipped   tuned tokens/s   x shipped   peak MB   of it the step's"
    )
    for backend in backends:
        before, peak = memory(size, vocab_size, backend, threads)
        rate = lambda seconds: f"{batch * length / seconds:8.0f}   {shipped / seconds:9.2f}"  # noqa: E731
        then = rate(tuned[backend][0]) if backend in tuned else " " * 20
        print(
            f"{backend:22}  {rate(as_comes[backend][0])}   {then:>26}   {peak:7}   {peak - before:7}",
            flush=True,
        )


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", action="append", choices=SIZES)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--vocab_size", type=int, default=1024)
    parser.add_argument("--plain", action="store_true")
    parser.add_argument("--memory_of", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    sizes = arguments.size or list(SIZES)
    if arguments.memory_of:
        return measure_memory(sizes[0], arguments.vocab_size, arguments.memory_of)
    if (
        importlib.util.find_spec("mambapy") is None
    ):  # transformers would run its plain loop without a word
        sys.exit("error: transformers' use_mambapy needs the package mambapy: pip install mambapy")
    print(
        f"torch {torch.__version__}, {arguments.threads} threads; C backends: {cpp.why_unavailable() or 'available'}"
    )
    backends = [backend for backend in THEIRS if arguments.plain or THEIRS[backend]]
    backends += [backend for backend in OURS if not ("cpp" in backend and cpp.why_unavailable())]
    for size in sizes:
        compare(size, arguments.vocab_size, backends, arguments.rounds, arguments.threads)


if __name__ == "__main__":
    main()
