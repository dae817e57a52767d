"""Loads a trained model from a run, a checkpoint, a .pth file or a folder of another library."""

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
from mamba_fsdp.trainer.kernel_selection import select_for_inference
from mamba_fsdp.trainer.setup import build_model


class Loaded(NamedTuple):
    """A model that is ready for inference. network(tokens), with tokens (batch, length) int64, returns the logits
    (batch, length, padded vocabulary). network(tokens, states) returns (logits, states), to read a long sequence in
    windows: the states for the first window are an empty list. MambaLM.forward describes the states."""

    network: torch.nn.Module  # a MambaLM; it computes in fp32 on a CPU and in bf16 on a GPU
    weights: Weights  # the source of the weights, with the ModelConfig as `config`

    @property
    def tokenizer_path(self) -> Path:
        """Returns the path of the model's tokenizer. Raises UserError if the model has none."""
        if not self.weights.tokenizer_path:
            raise UserError(
                f"{self.weights.source} has no tokenizer; give one with --tokenizer=PATH"
            )
        return self.weights.tokenizer_path


@functools.cache
def inference_world() -> World:
    """Returns the world of the ranks that torchrun has started. Each rank has the whole model and evaluates a part of
    the data."""
    return start_world()


def load(source: str | Path, *, model_name: str = "", reset_at_documents: bool = False) -> Loaded:
    """Loads a model for inference.

    source: a path or a name of a model, see interop/weights.py. model_name: the model's preset, if there is no
    config.json. reset_at_documents: whether the network accepts seq_idx. Raises UserError if there is no such model."""
    world = World.alone(device=inference_world().device)
    cpp.tune_process(world.device.type)
    weights = read_weights(source, model_name=model_name)
    settings = TrainConfig(weights.config).with_values(reset_at_documents=reset_at_documents)
    choice = select_for_inference(settings, world.device)
    parallel = build_model(settings, world, choice.backends)
    fill_shards(parallel.shards(), weights.slice)
    return Loaded(parallel.model.eval().requires_grad_(False), weights)


def ensure_loaded(model: Any, model_name: str = "") -> Loaded:
    """Returns `model` if it was loaded already, or loads it if it is a path. Raises UserError for other types."""
    if isinstance(model, (str, os.PathLike)):
        return load(os.fspath(model), model_name=model_name)
    if not hasattr(model, "network"):
        raise UserError(
            f"model: expected a path or the result of mamba_fsdp.load, not {type(model).__name__}"
        )
    return model
