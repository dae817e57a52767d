"""A whole training step on a GPU beside mamba_ssm's own model and transformers': tokens/s, MFU and peak memory.

    python -m benchmarks.gpu [--presets mamba-130m,mamba2-1.3b] [--lengths 2048,4096] [--batch 8] [--rounds 3]
                             [--steps 5] [--activation_checkpointing]
    python -m benchmarks.gpu --all [--out FOLDER] [--minutes 25]      all there is to measure: benchmarks/gpu/all.py

The step is forward, loss, backward, clipping and AdamW, in bf16 on fp32 weights: ours as training.py takes it (`ours`
in the backends that kernels=auto chooses, `libraries` in those of mamba-ssm's and causal-conv1d's kernels), mamba_ssm's
and transformers' under autocast with these libraries' kernels. A Llama (llama2_1.4b) stands beside mamba-1.4b. All
start from the same weights and see the same batch; a first loss or gradient norm unlike ours is noted in the table.
In each round each backend
in turn is built, takes two steps to warm up (Triton tunes itself then), is timed over `--steps` steps and dropped, so
that peak memory is its own. MFU is the model's FLOPs (mamba_fsdp/model/spec.py; recomputation is not counted) over the
device's dense bf16 peak.

Where the kernels can't be installed, benchmarks/gpu_setup.sh builds them. The output ends with a Markdown table
for benchmarks/RESULTS.md. Exit code 2 without a GPU.
"""

import argparse
import gc
import platform
import shlex
import statistics
import subprocess
import sys
import time
import traceback
from dataclasses import dataclass
from functools import partial
from importlib import metadata, util

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from config.model_config import ModelConfig
from config.presets import preset
from config.train_config import ParallelConfig, TrainConfig
from mamba_fsdp.data.loader import Batch
from mamba_fsdp.errors import UserError
from mamba_fsdp.interop import state_spaces, transformers_forms
from mamba_fsdp.model.init import initial_value
from mamba_fsdp.model.lm import MambaLM
from mamba_fsdp.model.spec import flops_per_token, operator_uses, parameters
from mamba_fsdp.ops.backends import REFERENCE, resolve_backends, why_unavailable
from mamba_fsdp.parallel.compat import has_fused_adamw
from mamba_fsdp.parallel.model import fill_parts
from mamba_fsdp.parallel.parallelize import parallelize
from mamba_fsdp.parallel.world import World
from mamba_fsdp.planning.devices import device_peak
from mamba_fsdp.train.loop import (
    accumulate_gradients,
    batch_loss,
    mean_loss_and_norm,
    sum_over_ranks,
    update_weights,
)
from mamba_fsdp.train.optimizer import make_optimizer

PRESETS = "mamba-130m,mamba-1.4b,llama2_1.4b,mamba2-1.3b,mamba-2.8b,mamba2-2.7b"
TOKENS = 16384  # of a step, where no --batch is given
WARM_UP = 2
FUSED_NODES = (
    "MambaInnerFnBackward",
    "MambaSplitConv1dScanCombinedFnBackward",
)  # mamba-ssm's, in a graph of autograd
SETTINGS = TrainConfig()


def our_form(config, weights, device, activation_checkpointing, kernels="auto"):
    """Like those below: (the mean loss of tokens (batch, length + 1), a step on them -> (loss, gradient norm))."""
    return our_parts(
        config,
        weights,
        device,
        ParallelConfig(fsdp_activation_checkpointing=activation_checkpointing),
        kernels,
    )[2:]


def our_parts(config, weights, device, spread, kernels="auto"):
    """(the parallel model, the optimizer, and what our_form returns)."""
    backends = REFERENCE
    if device.type == "cuda":
        backends = resolve_backends(kernels, "cuda", operator_uses(config, torch.bfloat16)).backends
    with torch.device("meta"):
        model = MambaLM(config, backends=backends, compute_dtype=torch.bfloat16)
    world = World.alone(device=device)
    parallel = parallelize(model, spread, world=world, compute_dtype=torch.bfloat16)
    fill_parts(parallel.shards(), lambda name, start, stop: weights[name].reshape(-1)[start:stop])
    optimizer = make_optimizer(
        parallel.parameters(), parameters(config), SETTINGS.optimizer, device
    )

    def batch_of(tokens):
        return Batch(tokens[:, :-1], labels=tokens[:, 1:])

    def step(tokens):
        counted = tokens[:, 1:].numel()
        multiple = torch.full((), counted, dtype=torch.float64, device=device)
        loss_sum = accumulate_gradients(parallel, optimizer, [batch_of(tokens)], 1 / multiple)
        sums = sum_over_ranks(world, loss_sum, parallel.gradient_squares(), counted)
        loss, gradient_norm, factor = mean_loss_and_norm(sums, multiple)
        update_weights(
            parallel,
            optimizer,
            loss,
            gradient_norm,
            factor,
            clip=SETTINGS.optimizer.grad_clip_thresh,
            lr=SETTINGS.optimizer.learning_rate,
        )
        return loss, gradient_norm

    return (
        parallel,
        optimizer,
        lambda tokens: batch_loss(parallel, batch_of(tokens)) / tokens[:, 1:].numel(),
        step,
    )


def need_kernels():
    reason = why_unavailable("mamba2", "fused")
    if reason:
        raise UserError(reason)


def mamba_ssm_form(config, weights, device, activation_checkpointing):
    if device.type == "cpu":
        raise UserError("its kernels need a GPU")
    need_kernels()
    from mamba_ssm.models.config_mamba import MambaConfig
    from mamba_ssm.models.mixer_seq_simple import MambaLMHeadModel

    model = MambaLMHeadModel(MambaConfig(**state_spaces.write_config(config)), device=device)
    if activation_checkpointing:
        for block in model.backbone.layers:
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    return peer_form(model, weights, device)


def transformers_form(config, weights, device, activation_checkpointing):
    if device.type == "cuda" and config.has("mamba1", "mamba2"):
        need_kernels()
    elif util.find_spec("mamba_ssm"):
        raise UserError(
            "where mamba_ssm is installed, transformers calls its CUDA kernels on a CPU too"
        )
    from transformers import AutoConfig, AutoModelForCausalLM

    form = transformers_forms.form_for(config)
    fields = form.write_config(config)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**fields, use_cache=False))
    if activation_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    theirs = {}
    for name, parts in transformers_forms.parts(form, config).items():
        rows = weights[name].split([shape[0] for _, shape in parts])
        theirs.update(zip([their_name for their_name, _ in parts], rows))
    return peer_form(model, theirs, device)


def peer_form(model, weights, device):
    embedding = next(iter(weights.values()))
    model.load_state_dict(
        {"lm_head.weight": embedding} | weights
    )  # a tied output layer has no weight of its own
    settings = SETTINGS.optimizer
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=settings.learning_rate,
        betas=(settings.beta1, settings.beta2),
        eps=settings.adam_epsilon,
        weight_decay=settings.weight_decay,
        fused=has_fused_adamw(device) or None,
    )

    def loss_of(tokens):
        with torch.autocast(device.type, torch.bfloat16):
            logits = model(tokens[:, :-1]).logits
        return F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())

    def step(tokens):
        optimizer.zero_grad(set_to_none=True)
        loss = loss_of(tokens)
        loss.backward()
        gradient_norm = torch.nn.utils.clip_grad_norm_(
            model.parameters(), settings.grad_clip_thresh
        )
        optimizer.step()
        return loss.item(), gradient_norm.item()

    return loss_of, step


def libraries_form(config, weights, device, activation_checkpointing):
    if device.type == "cpu":
        raise UserError("its kernels need a GPU")
    return our_form(config, weights, device, activation_checkpointing, kernels="fused")


BACKENDS = {
    "ours": our_form,
    "libraries": libraries_form,
    "mamba_ssm": mamba_ssm_form,
    "transformers": transformers_form,
}


@dataclass
class Row:
    """One backend at one size. Without figures, `note` is the reason."""

    preset: str
    length: int
    batch: int
    backend: str
    tokens_per_second: float = None
    times_ours: float = None
    mfu: float = None
    peak_gib: float = None
    note: str = ""

    HEAD = ("preset", "length", "batch", "backend", "tokens/s", "x ours", "MFU", "peak GiB", "note")

    def cells(self):
        figures = (
            (self.tokens_per_second, ",.0f"),
            (self.times_ours, ".2f"),
            (self.mfu, ".1%"),
            (self.peak_gib, ".1f"),
        )
        return (
            self.preset,
            str(self.length),
            str(self.batch),
            self.backend,
            *("-" if value is None else format(value, spec) for value, spec in figures),
            self.note,
        )


def count_fused(loss):
    """How many of mamba-ssm's whole-block operators the backward pass of `loss` will run."""
    seen, waiting, count = set(), [loss.grad_fn], 0
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            count += node.name() in FUSED_NODES
            waiting += [following for following, _ in node.next_functions]
    return count


def measure(backend, config, weights, tokens, device, steps, activation_checkpointing):
    """(first loss and gradient norm, seconds of each timed step, peak bytes on the GPU or None)."""
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(device)
    loss_of, step = BACKENDS[backend](config, weights, device, activation_checkpointing)
    if on_gpu and backend != "ours":
        recurrent = sum(layer.mixer != "attention" for layer in config.layer_list())
        fused = count_fused(loss_of(tokens))
        if fused != recurrent:
            raise UserError(f"only {fused} of {recurrent} layers run mamba-ssm's fused operator")
    first = [step(tokens) for _ in range(WARM_UP)][0]
    seconds = []
    for _ in range(steps):
        if on_gpu:
            torch.cuda.synchronize(device)
        began = time.perf_counter()
        step(tokens)
        if on_gpu:
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - began)
    return first, seconds, torch.cuda.max_memory_allocated(device) if on_gpu else None


def why_not(error):
    """What the table says of a backend that could not be measured; an error that nobody foresaw is shown in full."""
    if isinstance(error, torch.cuda.OutOfMemoryError):
        return "out of memory"
    if not isinstance(error, (UserError, ImportError)):
        traceback.print_exception(type(error), error, error.__traceback__)
    return (
        f"{type(error).__name__}: {(str(error) or 'no reason given').splitlines()[0]}".removeprefix(
            "UserError: "
        )
    )


def compare(
    name, config, weights, length, batch, *, device, rounds, steps, activation_checkpointing=False
):
    """A Row per backend. weights: parameter name -> CPU tensor that all start from."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, config.vocab_size, (batch, length + 1), generator=generator).to(
        device
    )
    measured, reasons = {backend: [] for backend in BACKENDS}, {}
    for _ in range(rounds):
        for backend in BACKENDS:
            if backend not in reasons:
                try:
                    result = measure(
                        backend, config, weights, tokens, device, steps, activation_checkpointing
                    )
                    measured[backend].append(result)
                except Exception as error:
                    reasons[backend] = why_not(error)
                gc.collect()  # models and what they saved for the backward pass hang together in circles
                if device.type == "cuda":
                    torch.cuda.empty_cache()
    return rows_of(name, config, length, batch, measured, reasons, device)


def rows_of(name, config, length, batch, measured, reasons, device):
    peak_flops = device_peak(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    rows = {
        backend: Row(name, length, batch, backend, note=reasons.get(backend, ""))
        for backend in measured
    }
    for backend, row in rows.items():
        if backend in reasons:
            continue
        firsts, seconds, peaks = zip(*measured[backend])
        row.tokens_per_second = batch * length / statistics.median(sum(seconds, []))
        row.mfu = (
            peak_flops and row.tokens_per_second * flops_per_token(config, length) / peak_flops
        )
        row.peak_gib = max(peaks) / 2**30 if device.type == "cuda" else None
        if "ours" not in reasons:
            row.times_ours = row.tokens_per_second / rows["ours"].tokens_per_second
            row.note = difference(firsts[0], measured["ours"][0][0])
    return list(rows.values())


def difference(first, ours):
    """Empty where the first loss and gradient norm are ours within what bf16 explains."""
    (loss, gradient_norm), (our_loss, our_norm) = first, ours
    if abs(loss - our_loss) < 0.02 and abs(gradient_norm / our_norm - 1) < 0.05:
        return ""
    return (
        f"not the same model: first loss {loss:.3f}, gradient norm {gradient_norm:.3f}; "
        f"ours {our_loss:.3f}, {our_norm:.3f}"
    )


def text_line(cells):
    return "{:<14}{:>7}{:>6}  {:<13}{:>10}{:>8}{:>8}{:>10}   {}".format(*cells).rstrip()


def markdown(rows):
    lines = [Row.HEAD, ("---",) * len(Row.HEAD), *(row.cells() for row in rows)]
    return "\n".join(
        "| " + " | ".join(cell.replace("|", "/") for cell in cells) + " |" for cells in lines
    )


def provenance(device, arguments):
    """Machine, commit and command, as benchmarks/RESULTS.md wants them."""
    name = (
        torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU {platform.machine()}"
    )
    versions = [f"torch {torch.__version__}"]
    for package in ("mamba_ssm", "causal_conv1d", "triton", "transformers"):
        try:
            versions.append(f"{package} {metadata.version(package)}")
        except metadata.PackageNotFoundError:
            versions.append(f"no {package}")
    try:
        commit = subprocess.check_output(
            ["git", "describe", "--always", "--dirty"], text=True, stderr=subprocess.DEVNULL
        ).strip()
    except (OSError, subprocess.CalledProcessError):
        commit = "unknown (not a git checkout)"
    return (
        f"Machine: {name}; {', '.join(versions)}. Commit: {commit}.\n"
        f"Command: `{shlex.join(['python', '-m', 'benchmarks.gpu', *arguments])}`"
    )


def parse(arguments):
    def names(text):
        return text.split(",")

    def numbers(text):
        return [int(word) for word in text.split(",")]

    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--presets", type=names, default=PRESETS)
    parser.add_argument("--lengths", type=numbers, default="2048,4096")
    parser.add_argument(
        "--batch", type=int, help=f"sequences per step (default: what makes {TOKENS} tokens)"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--steps", type=int, default=5, help="timed steps of each backend in each round"
    )
    parser.add_argument(
        "--activation_checkpointing",
        action="store_true",
        help="recompute every block in the backward pass",
    )
    options = parser.parse_args(arguments)
    if (
        min(
            options.rounds,
            options.steps,
            *options.lengths,
            1 if options.batch is None else options.batch,
        )
        < 1
    ):
        parser.error("rounds, steps, lengths and batch are numbers from 1 on")
    return options


def main(arguments=None, device=None):
    """Returns the exit code. device: for tests; the first GPU where none is given."""
    arguments = sys.argv[1:] if arguments is None else arguments
    options = parse(arguments)
    try:
        configs = {name: ModelConfig(**preset(name)) for name in options.presets}
        if device is None and not torch.cuda.is_available():
            raise UserError("benchmarks.gpu needs a CUDA device, and PyTorch sees none")
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    device = device or torch.device("cuda", 0)
    described = provenance(device, arguments)
    print(f"{described}\n\n{text_line(Row.HEAD)}", flush=True)
    rows = []
    for name, config in configs.items():
        weights = {
            parameter: initial_value(parameter, described, 0)
            for parameter, described in parameters(config).items()
        }
        for length in options.lengths:
            batch = options.batch or max(1, TOKENS // length)
            new = compare(
                name,
                config,
                weights,
                length,
                batch,
                device=device,
                rounds=options.rounds,
                steps=options.steps,
                activation_checkpointing=options.activation_checkpointing,
            )
            print("\n".join(text_line(row.cells()) for row in new), flush=True)
            rows += new
    print(f"\n{described}\n\n{markdown(rows)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
