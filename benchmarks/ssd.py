"""A whole training step of Mamba-2 on the CPU beside its peers: tokens/s, peak memory, share of the machine's rate.

    python -m benchmarks.ssd --mamba_ssm FOLDER [--rounds 7] [--threads 2]

The peers: transformers' Mamba-2, and a plain PyTorch Mamba-2 around mamba-ssm's ssd_minimal_discrete. FOLDER holds the
package mamba_ssm, of which one Python file is needed, so neither CUDA nor what it depends on but einops:
    export MAMBA_FORCE_BUILD=TRUE MAMBA_SKIP_CUDA_BUILD=TRUE
    pip install --no-deps --no-build-isolation --target FOLDER mamba-ssm==2.3.1
All start from the same weights and take the same step (forward, loss, backward, AdamW) on the same batch in one
process, one step of each in turn; medians are compared: first as PyTorch comes, then with what training.py sets at its
start (cpp.tune_process). On a busy machine CPU seconds tell more than the clock does. Peak memory is that of a
process of its own per backend. The share is that of the model's FLOPs per second in those of a 2048 x 2048 matrix product
in the backend's dtype.
"""

import argparse
import importlib.util
import subprocess
import sys
import types
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.measure import print_memory, time_in_turn, training_step
from config.model_config import ModelConfig
from mamba_fsdp.model.init import initial_value
from mamba_fsdp.model.lm import MambaLM
from mamba_fsdp.model.spec import flops_per_token, operator_uses, parameters
from mamba_fsdp.ops import cpp
from mamba_fsdp.ops.backends import resolve_backends

BATCH = 4
LENGTH = 512
CONFIG = ModelConfig(
    layers="mamba2",
    d_model=256,
    n_layer=8,
    vocab_size=4096,
    d_state=128,
    headdim=64,
    ngroups=1,
    chunk_size=256,
)
OURS = {
    "ours": (torch.float32, False),
    "ours, compiled": (torch.float32, True),
    "ours, bf16": (torch.bfloat16, False),
    "ours, bf16, compiled": (torch.bfloat16, True),
}
PEERS = ("transformers", "ssd_minimal")


def our_model(backend):
    dtype, compiled = OURS[backend]
    setting = "reference" if compiled else "auto"  # a call into C would cut the graph
    choice = resolve_backends(setting, "cpu", operator_uses(CONFIG, dtype))
    model = MambaLM(CONFIG, backends=choice.backends, compute_dtype=dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(initial_value(name, parameters(CONFIG)[name], 0))
    if compiled:
        for block in model.backbone.layers:
            block.compile()
    return model


def our_loss(backend):
    model = our_model(backend)
    return model, lambda tokens: model(tokens[:, :-1], tokens[:, 1:]) / (BATCH * LENGTH)


def transformers_loss():
    from transformers import Mamba2Config, Mamba2ForCausalLM

    model = Mamba2ForCausalLM(
        Mamba2Config(
            vocab_size=CONFIG.padded_vocab_size,
            hidden_size=CONFIG.d_model,
            num_hidden_layers=CONFIG.n_layer,
            state_size=CONFIG.d_state,
            head_dim=CONFIG.headdim,
            num_heads=CONFIG.n_ssm_head,
            n_groups=CONFIG.ngroups,
            chunk_size=CONFIG.chunk_size,
            use_cache=False,
            tie_word_embeddings=True,
        )
    )
    weights = {
        name.replace("embedding", "embeddings"): value
        for name, value in our_model("ours").state_dict().items()
    }
    model.load_state_dict(weights)

    def loss(tokens):
        logits = model(input_ids=tokens[:, :-1]).logits
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    return model, loss


class PlainBlock(nn.Module):
    """A Mamba-2 block as one writes it in plain PyTorch, around a given scan."""

    def __init__(self, weights, scan):
        super().__init__()
        self.weights = nn.ParameterDict(
            {name.replace(".", "_"): w.clone() for name, w in weights.items()}
        )
        self.scan = scan

    def forward(self, hidden):
        w = self.weights
        c = CONFIG
        states = c.ngroups * c.d_state
        x = F.rms_norm(hidden, (c.d_model,), w["norm_weight"], c.norm_eps)
        z, xbc, dt = (x @ w["mixer_in_proj_weight"].T).split(
            [c.d_inner, c.d_inner + 2 * states, c.n_ssm_head], dim=2
        )
        xbc = F.conv1d(
            xbc.transpose(1, 2),
            w["mixer_conv1d_weight"],
            w["mixer_conv1d_bias"],
            padding=c.d_conv - 1,
            groups=xbc.shape[2],
        )[..., : x.shape[1]]
        x, B, C = F.silu(xbc.transpose(1, 2)).split([c.d_inner, states, states], dim=2)
        x = x.unflatten(2, (-1, c.headdim))
        B, C = (
            t.unflatten(2, (c.ngroups, -1)).repeat_interleave(c.n_ssm_head // c.ngroups, 2)
            for t in (B, C)
        )
        dt = F.softplus(dt + w["mixer_dt_bias"])
        y, _ = self.scan(
            x * dt.unsqueeze(3), -torch.exp(w["mixer_A_log"]) * dt, B, C, 64
        )  # its fastest chunk
        y = (y + w["mixer_D"].unsqueeze(1) * x).flatten(2) * F.silu(z)
        y = F.rms_norm(y, (c.d_inner,), w["mixer_norm_weight"], c.norm_eps)
        return hidden + y @ w["mixer_out_proj_weight"].T


def ssd_minimal_loss(folder):
    sys.modules["mamba_ssm.ops.triton.ssd_combined"] = types.SimpleNamespace(
        mamba_chunk_scan_combined=None
    )
    spec = importlib.util.spec_from_file_location(
        "ssd_minimal", Path(folder, "mamba_ssm/modules/ssd_minimal.py")
    )
    ssd_minimal = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(ssd_minimal)
    weights = our_model("ours").state_dict()
    blocks = []
    for layer in range(CONFIG.n_layer):
        prefix = f"backbone.layers.{layer}."
        own = {
            name.removeprefix(prefix): w for name, w in weights.items() if name.startswith(prefix)
        }
        blocks.append(PlainBlock(own, ssd_minimal.ssd_minimal_discrete))
    embedding = nn.Parameter(weights["backbone.embedding.weight"].clone())
    norm = nn.Parameter(weights["backbone.norm_f.weight"].clone())
    model = nn.ModuleList([*blocks, nn.ParameterList([embedding, norm])])

    def loss(tokens):
        hidden = F.embedding(tokens[:, :-1], embedding)
        for block in blocks:
            hidden = block(hidden)
        hidden = F.rms_norm(hidden, (CONFIG.d_model,), norm, CONFIG.norm_eps)
        return F.cross_entropy((hidden @ embedding.T).flatten(0, 1), tokens[:, 1:].flatten())

    return model, loss


def make_step(backend, folder):
    """A function that takes one training step and returns its loss."""
    if backend in OURS:
        model, loss_of = our_loss(backend)
    else:
        model, loss_of = (
            transformers_loss() if backend == "transformers" else ssd_minimal_loss(folder)
        )
    tokens = torch.randint(
        0, CONFIG.vocab_size, (BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(0)
    )
    return training_step(model, loss_of, tokens)


def multiply_matrices(dtype):
    matrix = torch.randn(2048, 2048).to(dtype)
    return lambda: matrix @ matrix


def measure_memory(backend, folder):
    if backend in OURS:
        cpp.tune_process("cpu")
    print_memory(make_step(backend, folder))


def compare(backends, arguments):
    steps = {backend: make_step(backend, arguments.mamba_ssm) for backend in backends}
    losses = [step() for step in steps.values()]
    assert max(losses) - min(losses) < 0.01, f"these are not the same model: first losses {losses}"
    products = {dtype: multiply_matrices(dtype) for dtype in (torch.float32, torch.bfloat16)}
    tokens = BATCH * LENGTH
    flops = BATCH * LENGTH * flops_per_token(CONFIG, LENGTH)
    for tuned in (False, True):
        if tuned:
            cpp.tune_process("cpu")
        for step in steps.values():
            step()
        timed = time_in_turn(steps | products, arguments.rounds)
        if not tuned:
            shipped, shipped_cpu = (
                min(times)
                for times in zip(*(timed[backend] for backend in backends if backend in PEERS))
            )
        print(
            f"\n{'as training.py sets the process up' if tuned else 'as PyTorch comes'}; fp32 products "
            + ", bf16 ".join(
                f"{2 * 2048**3 / timed[dtype][0] / 1e9:.0f} GFLOP/s" for dtype in products
            )
        )
        print(
            "backend                    tokens/s   x better peer as it comes   tokens/CPU second      x   share of rate"
        )
        for backend in backends:
            clock, cpu = timed[backend]
            dtype = OURS.get(backend, (torch.float32,))[0]
            share = flops / clock / (2 * 2048**3 / timed[dtype][0])
            print(
                f"{backend:22}  {tokens / clock:8.0f}   {shipped / clock:25.2f}   {tokens / cpu:17.0f}   "
                f"{shipped_cpu / cpu:.2f}   {share:.0%}",
                flush=True,
            )
    print("\nform                    peak MB   of it the step's")
    for backend in backends:
        command = [
            sys.executable,
            "-m",
            "benchmarks.ssd",
            f"--threads={arguments.threads}",
            f"--memory_of={backend}",
            f"--mamba_ssm={arguments.mamba_ssm}",
        ]
        before, peak = map(
            int, subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
        )
        print(f"{backend:22}  {peak:7}   {peak - before:15}", flush=True)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--mamba_ssm", required=True, help="folder that holds the package mamba_ssm"
    )
    parser.add_argument(
        "--backend", action="append", choices=[*PEERS, *OURS], help="only these (default: all)"
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--memory_of", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    if not Path(arguments.mamba_ssm, "mamba_ssm/modules/ssd_minimal.py").exists():
        sys.exit(
            f"error: --mamba_ssm={arguments.mamba_ssm} holds no package mamba_ssm; --help says how to get it"
        )
    if arguments.memory_of:
        return measure_memory(arguments.memory_of, arguments.mamba_ssm)
    print(
        f"torch {torch.__version__}, {arguments.threads} threads; d_model {CONFIG.d_model}, {CONFIG.n_layer} layers, "
        f"{LENGTH} tokens, batch {BATCH}, vocabulary {CONFIG.vocab_size}"
    )
    compare(arguments.backend or [*PEERS, *OURS], arguments)


if __name__ == "__main__":
    main()
