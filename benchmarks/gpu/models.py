"""Compares a whole training step with mamba_ssm's own model and transformers': tokens/s, MFU and peak memory.

The step is forward, loss, backward, clipping and AdamW, in bf16 on fp32 weights: ours as training.py takes it, with our
Triton kernels and with mamba-ssm's, theirs under autocast with mamba-ssm's and causal-conv1d's kernels. All start from
the same weights and see the same batch; a first loss unlike ours is noted. In each round each model in turn is built,
warmed up, timed and dropped, so that peak memory is its own. MFU is the model's FLOPs (mamba_fsdp/model/spec.py) over
the device's dense bf16 peak.
"""

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial

import torch
import torch.nn.functional as F

from mamba_fsdp.data.loader import Batch
from mamba_fsdp.errors import UserError, first_line
from mamba_fsdp.interop import architectures, state_spaces
from mamba_fsdp.model.config import ModelConfig
from mamba_fsdp.model.init import initial_part
from mamba_fsdp.model.lm import MambaLM
from mamba_fsdp.model.presets import preset
from mamba_fsdp.model.spec import flops_per_token, operator_uses, parameters
from mamba_fsdp.ops import loss
from mamba_fsdp.ops.backends import resolve_backends, why_unavailable
from mamba_fsdp.ops.loss import CHUNK_ON_GPU
from mamba_fsdp.parallel.model import fill_parts
from mamba_fsdp.parallel.parallelize import parallelize
from mamba_fsdp.parallel.world import World
from mamba_fsdp.planning.devices import device_peak
from mamba_fsdp.settings.train_config import ParallelConfig, TrainConfig
from mamba_fsdp.trainer.loop import (
    accumulate_gradients,
    mean_loss_and_norm,
    sum_over_ranks,
    update_weights,
)
from mamba_fsdp.trainer.optimizer import make_optimizer

TINY = dict(layers="mamba1", d_model=32, n_layer=2, vocab_size=250)
SHAPES = ((8, 2048), (4, 4096))  # (batch, length)
ROUNDS = 2
WARM_UP = 2
STEPS = 5
LONGEST = 10  # seconds of a compiled step; a slower model would take the others' time
OPTIMIZER = TrainConfig().optimizer
PLAIN_LOSS = loss.chunk_loss

Weights = dict[str, torch.Tensor]
Step = Callable[[torch.Tensor], float]  # on tokens (batch, length + 1); returns the loss


def our_step(
    config: ModelConfig,
    weights: Weights,
    device: torch.device,
    preferred: str = "triton",
    *,
    kernels: str = "auto",
    use_torch_compile: bool = False,
    chunk: int = CHUNK_ON_GPU,
) -> Step:
    """Returns our step. kernels: as the setting. chunk: tokens whose logits exist at a time."""
    loss.chunk_loss = PLAIN_LOSS  # what compiled the one of an earlier model
    loss.CHUNK_ON_GPU = chunk
    uses = operator_uses(config, torch.bfloat16)
    first = dict.fromkeys(uses, preferred)
    backends = resolve_backends(kernels, device.type, uses, preferred=first).backends
    with torch.device("meta"):
        model = MambaLM(config, backends=backends, compute_dtype=torch.bfloat16)
    world = World.alone(device=device)
    settings = ParallelConfig(use_torch_compile=use_torch_compile)
    parallel = parallelize(model, settings, world=world, compute_dtype=torch.bfloat16)
    fill_parts(parallel.shards(), lambda name, start, stop: weights[name].reshape(-1)[start:stop])
    optimizer = make_optimizer(parallel, parameters(config), OPTIMIZER, torch.bfloat16)

    def step(tokens):
        batch = Batch(tokens[:, :-1], labels=tokens[:, 1:])
        counted = batch.labels.numel()
        multiple = torch.full((), counted, dtype=torch.float64, device=device)
        loss_sum = accumulate_gradients(parallel, optimizer, [batch], 1 / multiple)
        sums = sum_over_ranks(world, loss_sum, parallel.gradient_squares(), counted, [])
        mean_loss, norm, factor = mean_loss_and_norm(sums, multiple)
        clip = OPTIMIZER.grad_clip_thresh
        update_weights(
            parallel, optimizer, mean_loss, norm, factor, clip=clip, lr=OPTIMIZER.learning_rate
        )
        return float(mean_loss)

    return step


def our_step_in_fused(config: ModelConfig, weights: Weights, device: torch.device) -> Step:
    need_kernels(device)
    return our_step(config, weights, device, preferred="fused")


def mamba_ssm_step(config: ModelConfig, weights: Weights, device: torch.device) -> Step:
    need_kernels(device)
    from mamba_ssm.models.config_mamba import MambaConfig
    from mamba_ssm.models.mixer_seq_simple import MambaLMHeadModel

    model = MambaLMHeadModel(MambaConfig(**state_spaces.write_config(config)), device=device)
    return peer_step(model, weights, device)


def transformers_step(config: ModelConfig, weights: Weights, device: torch.device) -> Step:
    need_kernels(device)
    from transformers import AutoConfig, AutoModelForCausalLM

    architecture = architectures.architecture_for(config)
    fields = architecture.write_config(config)
    with torch.device(device):
        settings = AutoConfig.for_model(**fields, use_cache=False)
        model = AutoModelForCausalLM.from_config(settings, trust_remote_code=False)
    peer_weights = {}
    for name, stored in architecture.stored_tensors(config).items():
        rows = weights[name].split([tensor.shape[0] for tensor in stored])
        peer_weights.update(zip([tensor.name for tensor in stored], rows))
    return peer_step(model, peer_weights, device)


MODELS: Mapping[str, Callable[..., Step]] = {
    "ours": our_step,
    "ours, fused": our_step_in_fused,
    "mamba_ssm": mamba_ssm_step,
    "transformers": transformers_step,
}
# Ours in other forms, each group with ours in turn. The compiled ones are last: torch 2.2 compiles each block again.
FORMS: list[Mapping[str, Callable[..., Step]]] = [
    {"ours": our_step, "plain norms": partial(our_step, kernels="norm=reference")},
    {"ours": our_step, "loss of 1,024 tokens at a time": partial(our_step, chunk=1024)},
    {"ours": our_step, "use_torch_compile": partial(our_step, use_torch_compile=True)},
]


def need_kernels(device: torch.device) -> None:
    reason = (
        "its kernels need a GPU" if device.type == "cpu" else why_unavailable("mamba2", "fused")
    )
    if reason:
        raise UserError(reason)


def peer_step(model: torch.nn.Module, weights: Weights, device: torch.device) -> Step:
    embedding = next(iter(weights.values()))
    model.load_state_dict({"lm_head.weight": embedding} | weights)  # ours has none if it is tied
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=OPTIMIZER.learning_rate,
        betas=(OPTIMIZER.beta1, OPTIMIZER.beta2),
        eps=OPTIMIZER.adam_epsilon,
        weight_decay=OPTIMIZER.weight_decay,
        fused=True,
    )

    def step(tokens):
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(device.type, torch.bfloat16):
            logits = model(tokens[:, :-1]).logits
        loss = F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), OPTIMIZER.grad_clip_thresh)
        optimizer.step()
        return float(loss.detach())

    return step


def time_steps(step: Step, tokens: torch.Tensor) -> tuple[float, list[float]]:
    """Returns (the first loss, seconds of each timed step). A step ends when its loss is read."""
    losses = []
    for _ in range(WARM_UP):
        began = time.perf_counter()
        losses.append(step(tokens))
    warm = time.perf_counter() - began
    if warm > LONGEST:
        raise UserError(f"a step takes {warm:.0f} s")
    seconds = []
    for _ in range(STEPS):
        began = time.perf_counter()
        step(tokens)
        if tokens.is_cuda:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    return losses[0], seconds


def initial_weights(config: ModelConfig) -> Weights:
    weights = {}
    for parameter, described in parameters(config).items():
        value = initial_part(parameter, described, 0, 0, described.size)
        weights[parameter] = value.view(described.shape)
    return weights


def made_up_tokens(
    config: ModelConfig, batch: int, length: int, device: torch.device
) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(config.vocab_size, (batch, length + 1), generator=generator).to(device)


def measure(name: str, device: torch.device, rehearse: bool) -> Iterator[dict[str, object]]:
    config = ModelConfig(**(TINY if rehearse else preset(name)))
    weights = initial_weights(config)
    for batch, length in ((1, 8),) if rehearse else SHAPES:
        yield from compare(config, weights, made_up_tokens(config, batch, length, device), MODELS)


def measure_forms(device: torch.device, rehearse: bool) -> Iterator[dict[str, object]]:
    """Yields rows of our forms in the order of FORMS, each in both models before the next."""
    batch, length = (1, 8) if rehearse else SHAPES[0]
    presets = {"tiny": TINY}
    if not rehearse:
        presets = {name: preset(name) for name in ("mamba2-1.3b", "mamba-1.4b")}
    configs = {name: ModelConfig(**sizes) for name, sizes in presets.items()}
    weights = {name: initial_weights(config) for name, config in configs.items()}
    for forms in FORMS:
        for name, config in configs.items():
            tokens = made_up_tokens(config, batch, length, device)
            for row in compare(config, weights[name], tokens, forms):
                yield {"preset": name} | row


def compare(
    config: ModelConfig,
    weights: Weights,
    tokens: torch.Tensor,
    models: Mapping[str, Callable[..., Step]],
) -> Iterator[dict[str, object]]:
    """Yields a row per model."""
    first: dict[str, float] = {}
    seconds: dict[str, list[float]] = {model: [] for model in models}
    peaks = dict.fromkeys(models, 0.0)
    notes: dict[str, str] = {}
    for _ in range(ROUNDS):
        for model, build in models.items():
            if model in notes:
                continue
            if tokens.is_cuda:
                torch.cuda.reset_peak_memory_stats()
            try:
                first[model], taken = time_steps(build(config, weights, tokens.device), tokens)
                seconds[model] += taken
            except Exception as error:
                notes[model] = f"{type(error).__name__}: {first_line(error)}"
            gc.collect()  # models and what they saved for the backward pass refer to each other
            if tokens.is_cuda:
                peaks[model] = torch.cuda.max_memory_allocated() / 2**30
                torch.cuda.empty_cache()
    batch, length = tokens[:, 1:].shape
    peak_flops = device_peak(torch.cuda.get_device_name()) if tokens.is_cuda else None
    for model in models:
        row: dict[str, object] = {"batch": batch, "length": length, "model": model}
        row |= dict.fromkeys(("tokens/s", "x ours", "MFU", "peak GiB"), "-")
        row["note"] = notes.get(model, "")
        if model not in notes:
            rate = batch * length / statistics.median(seconds[model])
            row["tokens/s"] = f"{rate:,.0f}"
            row["peak GiB"] = f"{peaks[model]:.1f}"
            if peak_flops:
                row["MFU"] = f"{rate * flops_per_token(config, length) / peak_flops:.1%}"
            if "ours" not in notes:
                ours = statistics.median(seconds["ours"])
                row["x ours"] = f"{ours / statistics.median(seconds[model]):.2f}"
                if abs(first[model] - first["ours"]) > 0.02:
                    row["note"] = f"not the same model: first loss {first[model]:.3f}"
        yield row
