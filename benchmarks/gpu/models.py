"""Compares a whole training step with mamba_ssm's own model and transformers': tokens/s, MFU and peak memory; and our
step with other settings.

The step is forward, loss, backward, clipping and AdamW, in bf16 on fp32 weights: ours as training.py takes it, with our
Triton kernels and with mamba-ssm's, theirs under autocast with mamba-ssm's and causal-conv1d's kernels. All start from
the same weights and see the same batch; a first loss unlike ours is noted. Each model in turn is built,
warmed up, timed and dropped, so that peak memory is its own; its row is there at once. MFU is the model's FLOPs (mamba_fsdp/model/spec.py) over
the device's dense bf16 peak.
"""

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial

import torch
import torch.nn.functional as F

from benchmarks.our_step import our_step
from mamba_fsdp.errors import UserError, first_line
from mamba_fsdp.interop import architectures, state_spaces
from mamba_fsdp.model.config import ModelConfig
from mamba_fsdp.model.init import initial_values
from mamba_fsdp.model.presets import preset
from mamba_fsdp.model.spec import flops_per_token, parameters
from mamba_fsdp.ops import loss
from mamba_fsdp.ops.backends import why_unavailable
from mamba_fsdp.planning.devices import device_peak
from mamba_fsdp.settings.train_config import TrainConfig

TINY = dict(layers="mamba1,mamba2", d_model=64, n_layer=2, vocab_size=250, d_state=16, headdim=32)
SHAPES = ((8, 2048), (4, 4096))  # (batch, length)
WARM_UP = 2
STEPS = 5
LONGEST = 10  # seconds of a compiled step; a slower model would take the others' time

Row = dict[str, object]
Step = Callable[[torch.Tensor], float]  # on tokens (batch, length + 1); returns the loss
Build = Callable[[TrainConfig, torch.device], Step]


def our_step_in_fused(settings: TrainConfig, device: torch.device) -> Step:
    need_kernels(device)
    return our_step(settings, device, preferred="fused")


def mamba_ssm_step(settings: TrainConfig, device: torch.device) -> Step:
    need_kernels(device)
    from mamba_ssm.models.config_mamba import MambaConfig
    from mamba_ssm.models.mixer_seq_simple import MambaLMHeadModel

    config = MambaConfig(**state_spaces.write_config(settings.model))
    model = MambaLMHeadModel(config, device=device)
    return peer_step(model, initial_weights(settings), settings, device)


def transformers_step(settings: TrainConfig, device: torch.device) -> Step:
    need_kernels(device)
    from transformers import AutoConfig, AutoModelForCausalLM

    architecture = architectures.architecture_for(settings.model)
    fields = architecture.write_config(settings.model)
    with torch.device(device):
        config = AutoConfig.for_model(**fields, use_cache=False)
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    weights = initial_weights(settings)
    peer_weights = {}
    for name, stored in architecture.stored_tensors(settings.model).items():
        rows = weights[name].split([tensor.shape[0] for tensor in stored])
        peer_weights.update(zip([tensor.name for tensor in stored], rows))
    return peer_step(model, peer_weights, settings, device)


OURS = partial(our_step, preferred="triton")
PEERS: dict[str, Build] = {
    "ours": OURS,
    "mamba_ssm": mamba_ssm_step,
    "transformers": transformers_step,
    "ours, fused": our_step_in_fused,
}
# Ours with other settings, each with ours in turn. The compiled one is last: torch 2.2 compiles each block again.
OTHER_SETTINGS: tuple[dict[str, Build], ...] = (
    {"ours": OURS, "plain norms": partial(OURS, kernels="norm=reference")},
    {"ours": OURS, "use_torch_compile": partial(OURS, use_torch_compile=True)},
)


def need_kernels(device: torch.device) -> None:
    if device.type == "cpu":
        raise UserError("its kernels need a GPU")
    reason = why_unavailable("mamba2", "fused")
    if reason:
        raise UserError(reason)


def initial_weights(settings: TrainConfig) -> dict[str, torch.Tensor]:
    """Returns the weights that our step starts from."""
    weights = {}
    for name, described in parameters(settings.model).items():
        value = initial_values(name, described, settings.training.seed, 0, described.size)
        weights[name] = value.view(described.shape)
    return weights


def peer_step(
    model: torch.nn.Module,
    weights: Mapping[str, torch.Tensor],
    settings: TrainConfig,
    device: torch.device,
) -> Step:
    options = settings.optimizer
    embedding = next(iter(weights.values()))
    model.load_state_dict({"lm_head.weight": embedding} | weights)  # ours has none if it is tied
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


def time_steps(step: Step, tokens: torch.Tensor) -> tuple[float, list[float]]:
    """Returns (the first loss, seconds of each timed step). A step ends when its loss is read."""
    first = step(tokens)
    seconds = []
    for _ in range(WARM_UP - 1 + STEPS):
        began = time.perf_counter()
        step(tokens)
        if tokens.is_cuda:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
        if seconds[0] > LONGEST:
            raise UserError(f"a step takes {seconds[0]:.0f} s")
    return first, seconds[WARM_UP - 1 :]


def measure(name: str, device: torch.device, rehearse: bool) -> Iterator[Row]:
    """Yields rows of a preset beside its peers."""
    for shape in SHAPES:
        yield from compare(name, shape, PEERS, device, rehearse)


def measure_steps(device: torch.device, rehearse: bool) -> Iterator[Row]:
    """Yields rows of our step with other settings, each in both models before the next."""
    for builds in OTHER_SETTINGS:
        for name in ("mamba2-1.3b", "mamba-1.4b"):
            yield from compare(name, SHAPES[0], builds, device, rehearse)


def compare(
    name: str,
    shape: tuple[int, int],
    builds: Mapping[str, Build],
    device: torch.device,
    rehearse: bool,
) -> Iterator[Row]:
    """Yields a row per model, of which the first is ours."""
    batch, length = (1, 8) if rehearse else shape
    config = ModelConfig(**(TINY if rehearse else preset(name)))
    settings = TrainConfig(config).with_values(
        mixed_precision="bf16",
        batch_size=batch,
        seq_length=length,
        reset_at_documents=False,
        sharding_strategy="none",
    )
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(config.vocab_size, (batch, length + 1), generator=generator).to(device)
    ours = 0.0  # seconds of a step
    our_loss = 0.0
    for title, build in builds.items():
        row: Row = {"preset": name, "batch": batch, "length": length, "model": title}
        row |= dict.fromkeys(("tokens/s", "x ours", "MFU", "peak GiB", "note"), "-")
        plain_loss = loss.on_device  # which use_torch_compile replaces
        seconds = 0.0
        try:
            first, taken = time_steps(build(settings, device), tokens)
            seconds = statistics.median(taken)
        except Exception as error:
            row["note"] = f"{type(error).__name__}: {first_line(error)}"
        loss.on_device = plain_loss
        gc.collect()  # models and what they saved for the backward pass refer to each other
        peak = forget_peak(device)
        if not seconds:
            yield row
            continue
        if title == "ours":
            ours = seconds
            our_loss = first
        rate = batch * length / seconds
        row |= {"tokens/s": f"{rate:,.0f}", "peak GiB": f"{peak:.1f}"}
        if device.type == "cuda":
            peak_flops = device_peak(torch.cuda.get_device_name())
            if peak_flops:
                row["MFU"] = f"{rate * flops_per_token(config, length) / peak_flops:.1%}"
        if ours:
            row["x ours"] = f"{ours / seconds:.2f}"
            if abs(first - our_loss) > 0.02:
                row["note"] = f"not the same model: first loss {first:.3f}"
        yield row


def forget_peak(device: torch.device) -> float:
    """Returns the GiB that were allocated at most, and begins to count anew."""
    if device.type == "cpu":
        return 0.0
    peak = torch.cuda.max_memory_allocated() / 2**30
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    return peak
