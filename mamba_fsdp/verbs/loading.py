"""A trained model with its tokenizer, out of a run, a checkpoint, a .pth file or another library's folder."""

import functools
from pathlib import Path
from typing import NamedTuple

import torch

from mamba_fsdp.errors import UserError
from mamba_fsdp.interop.weights import Weights, read_weights
from mamba_fsdp.ops import cpp
from mamba_fsdp.parallel.model import fill_parts
from mamba_fsdp.parallel.world import World, start_world
from mamba_fsdp.settings.train_config import TrainConfig
from mamba_fsdp.trainer.first_use import choose_for_answers
from mamba_fsdp.trainer.setup import build_model


class Loaded(NamedTuple):
    """A model ready for inference. network(tokens (batch, length)) gives logits (batch, length, padded vocabulary)."""

    network: torch.nn.Module  # a MambaLM: fp32 on a CPU, bf16 arithmetic on a GPU
    weights: Weights  # and its `config`

    @property
    def tokenizer_path(self) -> Path:
        """Of the tokenizer that came along. Raises UserError where there is none."""
        if not self.weights.tokenizer_path:
            raise UserError(f"{self.weights.source} has no tokenizer; name one: --tokenizer=PATH")
        return self.weights.tokenizer_path


@functools.cache
def inference_world() -> World:
    """The ranks that torchrun has started: each has the whole model, and together they evaluate."""
    return start_world()


def load(source: str | Path, *, model_name: str = "", reset_at_documents: bool = False) -> Loaded:
    """Returns the model that `source` names, see interop/weights.py. model_name: the preset that it is, where there is
    no config.json. Raises UserError."""
    world = World.alone(device=inference_world().device)
    cpp.tune_process(world.device.type)
    weights = read_weights(source, model_name=model_name)
    settings = TrainConfig(weights.config)
    settings.data.reset_at_documents = reset_at_documents
    settings.training.settle_precision(world.device.type)
    choice = choose_for_answers(settings, world.device)
    parallel = build_model(settings, world, choice.backends)
    fill_parts(parallel.shards(), weights.slice)
    return Loaded(parallel.model.eval().requires_grad_(False), weights)
