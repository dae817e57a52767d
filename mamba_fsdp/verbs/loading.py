"""A trained model with its tokenizer, out of a run, a checkpoint, a .pth file or another library's folder."""

import functools
import os
from pathlib import Path
from typing import NamedTuple

import torch

from mamba_fsdp.errors import UserError
from mamba_fsdp.interop.weights import Weights, find_weights, read_weights
from mamba_fsdp.ops import cpp
from mamba_fsdp.parallel.model import fill_parts
from mamba_fsdp.parallel.world import World, start_world
from mamba_fsdp.run_layout import CHECKPOINTS, check_exists, committed
from mamba_fsdp.settings import resolve
from mamba_fsdp.settings.train_config import TrainConfig
from mamba_fsdp.storage import exists
from mamba_fsdp.trainer.first_use import choose_for_answers
from mamba_fsdp.trainer.setup import build_model


def starting_weights(config: TrainConfig) -> Weights | None:
    """Returns the Weights that init_from names, whose shape `config` then takes, or those of a file that load_ckpt_path
    names; not yet open. None without either.

    A run that has a checkpoint of its own needs none: where those of init_from are gone, the shape is that one's. Raises UserError where they are of another model than the settings ask for, or what a run needs is not there.
    """
    checkpoint = config.checkpoint
    if os.environ.get("RANK", "0") == "0":  # a thousand ranks would look it up at once
        check_exists(checkpoint.load_ckpt_path, checkpoint.save_ckpt_path)
    if checkpoint.init_from:
        names_a_model = vars(config.model).keys() & config.explicit
        source = f"init_from {checkpoint.init_from}"
        try:
            weights = find_weights(checkpoint.init_from, config.model if names_a_model else None)
        except UserError:
            if not committed(Path(checkpoint.save_ckpt_path, CHECKPOINTS)):
                raise
            source = f"save_ckpt_path {checkpoint.save_ckpt_path}"
            weights = find_weights(checkpoint.save_ckpt_path)
        resolve.adopt_model(config, weights.config, source)
        return weights
    if not checkpoint.names_a_file() or not exists(checkpoint.load_ckpt_path):
        return None
    weights = find_weights(checkpoint.load_ckpt_path, config.model)
    resolve.check_same_model(config, weights.config, f"load_ckpt_path {checkpoint.load_ckpt_path}")
    return weights


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
