"""Loads a trained model with its tokenizer from a run, a checkpoint, a .pth file or another library's folder."""

import functools
import os
from pathlib import Path
from typing import Any, NamedTuple

import torch

from mamba_fsdp.errors import UserError
from mamba_fsdp.interop.weights import Weights, read_weights
from mamba_fsdp.ops import cpp
from mamba_fsdp.parallel.model import fill_shards
from mamba_fsdp.parallel.world import World, start_world
from mamba_fsdp.settings.train_config import TrainConfig
from mamba_fsdp.trainer.first_use import choose_for_answers
from mamba_fsdp.trainer.setup import build_model


class Loaded(NamedTuple):
    """A model ready for inference. network(tokens (batch, length)) returns logits (batch, length, padded
    vocabulary)."""

    network: torch.nn.Module  # a MambaLM: fp32 on a CPU, bf16 arithmetic on a GPU
    weights: Weights  # has the model's `config`

    @property
    def tokenizer_path(self) -> Path:
        """Returns the path of the model's tokenizer. Raises UserError if the model has none."""
        if not self.weights.tokenizer_path:
            raise UserError(f"{self.weights.source} has no tokenizer; name one: --tokenizer=PATH")
        return self.weights.tokenizer_path


@functools.cache
def inference_world() -> World:
    """Returns the world of the ranks that torchrun has started. Each rank has the whole model; they share the
    evaluation."""
    return start_world()


def load(source: str | Path, *, model_name: str = "", reset_at_documents: bool = False) -> Loaded:
    """Returns the model that `source` names, see interop/weights.py. model_name: its preset, if there is no
    config.json. Raises UserError if there is no such model."""
    world = World.alone(device=inference_world().device)
    cpp.tune_process(world.device.type)
    weights = read_weights(source, model_name=model_name)
    settings = TrainConfig(weights.config).changed(reset_at_documents=reset_at_documents)
    choice = choose_for_answers(settings, world.device)
    parallel = build_model(settings, world, choice.backends)
    fill_shards(parallel.shards(), weights.slice)
    return Loaded(parallel.model.eval().requires_grad_(False), weights)


def as_loaded(model: Any, model_name: str = "") -> Loaded:
    """Returns a model that was loaded, or loads the one that a path names. Raises UserError for anything else."""
    if isinstance(model, (str, os.PathLike)):
        return load(os.fspath(model), model_name=model_name)
    if not hasattr(model, "network"):
        raise UserError(
            f"model: expected a path or what mamba_fsdp.load returned, not {type(model).__name__}"
        )
    return model
