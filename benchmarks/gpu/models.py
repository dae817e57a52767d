"""Compares a training step with the models of mamba_ssm and transformers: tokens/s, MFU and peak memory.

A step consists of forward, loss, backward, clipping and AdamW, in bf16 with fp32 weights. This project runs with our Triton
kernels, and again with the kernels of mamba-ssm. The other models run under autocast with the kernels of mamba-ssm and
causal-conv1d. All models start from the same weights and read the same batch. If the first loss of a model differs from ours,
its row says so. The models are built, timed and deleted one after the other, so that each has its own peak memory. MFU is the
number of FLOPs (see mamba_fsdp/model/spec.py) divided by the dense bf16 peak of the device.

Most rows have a few steps on a cool GPU. The last row has 150 steps on a GPU that the other models have warmed, with the
medians of its sensors.
"""

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F

from benchmarks.gpu.sensors import Sensors
from benchmarks.our_step import our_step
from mamba_fsdp.errors import UserError, first_line
from mamba_fsdp.interop import architectures, state_spaces
from mamba_fsdp.model.config import ModelConfig
from mamba_fsdp.model.init import initial_values
from mamba_fsdp.model.presets import preset
from mamba_fsdp.model.spec import flops_per_token, parameters
from mamba_fsdp.ops.backends import why_unavailable
from mamba_fsdp.planning.devices import device_peak
from mamba_fsdp.settings.train_config import TrainConfig

PRESETS = ("mamba2-1.3b", "mamba-1.4b")
TINY = dict(d_model=64, n_layer=2, vocab_size=250, d_state=16, headdim=32)
BATCH = 8
LENGTH = 2048
# A model with slower steps is not measured, so that time is left for the other models.
MAX_STEP_SECONDS = 10

Row = dict[str, object]
Weights = Mapping[str, torch.Tensor]
# A function of tokens (batch, length + 1) that returns the loss.
Step = Callable[[torch.Tensor], float]
Build = Callable[[TrainConfig, torch.device, Weights], Step]


class Steps(NamedTuple):
    """The numbers of steps of a measurement."""

    warm_up: int
    timed: int


class Timed(NamedTuple):
    """The result of a measurement."""

    first_loss: float
    seconds: float  # median seconds per step
    peak: float  # peak memory in GiB
    sensors: str


def our_step_in_fused(settings: TrainConfig, device: torch.device, weights: Weights) -> Step:
    need_kernels(device)
    return our_step(settings, device, weights, preferred="fused")


def mamba_ssm_step(settings: TrainConfig, device: torch.device, weights: Weights) -> Step:
    need_kernels(device)
    from mamba_ssm.models.config_mamba import MambaConfig
    from mamba_ssm.models.mixer_seq_simple import MambaLMHeadModel

    config = MambaConfig(**state_spaces.write_config(settings.model))
    model = MambaLMHeadModel(config, device=device)
    return peer_step(model, weights, settings, device)


def transformers_step(settings: TrainConfig, device: torch.device, weights: Weights) -> Step:
    need_kernels(device)
    from transformers import AutoConfig, AutoModelForCausalLM

    architecture = architectures.architecture_for(settings.model)
    fields = architecture.write_config(settings.model)
    with torch.device(device):
        config = AutoConfig.for_model(**fields, use_cache=False)
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    peer_weights = {}
    for name, stored in architecture.stored_tensors(settings.model).items():
        rows = weights[name].split([tensor.shape[0] for tensor in stored])
        peer_weights.update(zip([tensor.name for tensor in stored], rows))
    return peer_step(model, peer_weights, settings, device)


STEPS = Steps(2, 5)
OURS = partial(our_step, preferred="triton")
MODELS: dict[str, tuple[Build, Steps]] = {
    "ours": (OURS, STEPS),
    "mamba_ssm": (mamba_ssm_step, STEPS),
    "transformers": (transformers_step, STEPS),
    "ours, fused": (our_step_in_fused, STEPS),
    "ours, warm": (OURS, Steps(10, 150)),
}


def need_kernels(device: torch.device) -> None:
    if device.type == "cpu":
        raise UserError("its kernels need a GPU")
    reason = why_unavailable("mamba2", "fused")
    if reason:
        raise UserError(reason)


def initial_weights(settings: TrainConfig) -> dict[str, torch.Tensor]:
    """Returns the weights that a run with these settings starts from."""

    def draw(name: str) -> torch.Tensor:
        described = spec[name]
        value = initial_values(name, described, settings.training.seed, 0, described.size)
        return value.view(described.shape)

    spec = parameters(settings.model)
    with ThreadPoolExecutor() as threads:
        return dict(zip(spec, threads.map(draw, spec)))


def peer_step(
    model: torch.nn.Module, weights: Weights, settings: TrainConfig, device: torch.device
) -> Step:
    options = settings.optimizer
    embedding = next(iter(weights.values()))
    # Our weights have no lm_head.weight if it is tied to the embedding.
    model.load_state_dict({"lm_head.weight": embedding} | weights)
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=options.learning_rate,
        betas=(options.beta1, options.beta2),
        eps=options.adam_epsilon,
        weight_decay=options.weight_decay,
        fused=True,
    )

    def step(tokens: torch.Tensor) -> float:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(device.type, torch.bfloat16):
            logits = model(tokens[:, :-1]).logits
        mean_loss = F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
        mean_loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), options.grad_clip_thresh)
        optimizer.step()
        return float(mean_loss.detach())

    return step


def settings_of(name: str, rehearse: bool, **others: int) -> TrainConfig:
    """Returns the settings of a training of a preset. others: ModelConfig fields that replace the preset's."""
    sizes = TINY if rehearse else {}
    config = preset(name) | sizes | others
    return TrainConfig(ModelConfig(**config)).with_values(
        mixed_precision="bf16",
        batch_size=1 if rehearse else BATCH,
        seq_length=16 if rehearse else LENGTH,
        reset_at_documents=False,
        sharding_strategy="none",
    )


def made_up_tokens(settings: TrainConfig, device: torch.device) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    shape = (settings.training.batch_size, settings.data.seq_length + 1)
    return torch.randint(settings.model.vocab_size, shape, generator=generator).to(device)


def time_steps(step: Step, tokens: torch.Tensor, steps: Steps) -> tuple[float, list[float]]:
    """Returns (the first loss, seconds of each timed step)."""
    first = step(tokens)
    seconds = []
    for _ in range(steps.warm_up - 1 + steps.timed):
        began = time.perf_counter()
        step(tokens)
        if tokens.is_cuda:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
        if seconds[0] > MAX_STEP_SECONDS:
            raise UserError(f"a step takes {seconds[0]:.0f} s")
    return first, seconds[steps.warm_up - 1 :]


def measure(name: str, device: torch.device, rehearse: bool) -> Iterator[Row]:
    """Yields a row for each model, first for ours."""
    settings = settings_of(name, rehearse)
    weights = initial_weights(settings)
    ours = None
    for title, (build, steps) in MODELS.items():
        row: Row = {"preset": name, "model": title}
        row |= dict.fromkeys(("tokens/s", "x ours", "MFU", "peak GiB", "sensors", "note"), "-")
        try:
            timed = time_model(build, settings, device, weights, steps)
        except Exception as error:
            yield row | {"note": f"{type(error).__name__}: {first_line(error)}"}
            continue
        ours = ours or timed
        yield row | cells(timed, ours, settings)


def time_model(
    build: Build, settings: TrainConfig, device: torch.device, weights: Weights, steps: Steps
) -> Timed:
    """Builds a model, times its steps, and deletes it."""
    tokens = made_up_tokens(settings, device)
    try:
        with Sensors() as sensors:
            first_loss, seconds = time_steps(build(settings, device, weights), tokens, steps)
    finally:
        gc.collect()  # reference cycles still hold the model
        peak = forget_peak(device)
    return Timed(first_loss, statistics.median(seconds), peak, sensors.medians(sum(seconds)))


def cells(timed: Timed, ours: Timed, settings: TrainConfig) -> Row:
    """Returns the cells with the results of a model."""
    length = settings.data.seq_length
    rate = settings.training.batch_size * length / timed.seconds
    row: Row = {"tokens/s": f"{rate:,.0f}", "x ours": f"{ours.seconds / timed.seconds:.2f}"}
    row |= {"peak GiB": f"{timed.peak:.1f}", "sensors": timed.sensors}
    if torch.cuda.is_available():
        peak_flops = device_peak(torch.cuda.get_device_name())
        if peak_flops:
            row["MFU"] = f"{rate * flops_per_token(settings.model, length) / peak_flops:.1%}"
    if abs(timed.first_loss - ours.first_loss) > 0.02:
        row["note"] = f"not the same model: first loss {timed.first_loss:.3f}"
    return row


def forget_peak(device: torch.device) -> float:
    """Returns the peak of the allocated memory in GiB, and resets it."""
    if device.type == "cpu":
        return 0.0
    peak = torch.cuda.max_memory_allocated() / 2**30
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    return peak
