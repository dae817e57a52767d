"""The memory that is expected of a device, beside what is there: parameters, gradients, moments."""

import pytest
import torch

from config.model_config import ModelConfig
from config.train_config import OptimizerConfig, ParallelConfig, TrainConfig
from mamba_fsdp.model.lm import MambaLM
from mamba_fsdp.model.spec import parameters
from mamba_fsdp.parallel.model import fill_parts
from mamba_fsdp.parallel.parallelize import parallelize
from mamba_fsdp.parallel.world import World
from mamba_fsdp.planning.memory import expected_memory
from mamba_fsdp.train.optimizer import make_optimizer
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.torch22
HYBRID = dict(
    d_model=64,
    n_layer=3,
    vocab_size=512,
    layers="mamba1,mamba2,attention+mlp",
    headdim=16,
    tie_embeddings=False,
)


def held(world, strategy):
    """({name: bytes} after an update, those expected), of this rank."""
    config = ModelConfig(**HYBRID)
    how = ParallelConfig(sharding_strategy=strategy)
    settings = TrainConfig(model=config, parallel=how)
    settings.training.mixed_precision = "fp32"
    with torch.device("meta"):
        model = MambaLM(config)
    parallel = parallelize(model, how, world=world, compute_dtype=torch.float32)
    fill_parts(parallel.shards(), lambda name, start, stop: torch.full((stop - start,), 0.01))
    optimizer = make_optimizer(
        parallel.parameters(), parameters(config), OptimizerConfig(), world.device
    )
    tokens = torch.zeros(1, 8, dtype=torch.int64)
    parallel.module(tokens, labels=tokens).backward()
    parallel.reduce_gradients()
    optimizer.step()
    there = list(parallel.parameters().values())
    moments = [
        tensor
        for state in optimizer.state.values()
        for name, tensor in state.items()
        if name != "step"
    ]
    found = {
        "weights": there,
        "gradients": [parameter.grad for parameter in there],
        "moments": moments,
    }
    return (
        {
            name: sum(tensor.nbytes for tensor in tensors if tensor is not None)
            for name, tensors in found.items()
        },
        expected_memory(settings, world, {}),
    )


@pytest.mark.parametrize(
    "strategy, count",
    [
        ("none", 1),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in [("ddp", 2), ("fsdp", 2), ("hsdp", 4)]
        ),
    ],
)
def test_weights_gradients_and_moments_are_those_that_are_there(strategy, count):
    """On the rank that holds most; FSDP1 pads its flat parameters by a few elements."""
    ranks = [held(World.alone(), strategy)] if count == 1 else run_ranks(count, held, strategy)
    for name in ("weights", "gradients", "moments"):
        assert max(found[name] for found, _ in ranks) == pytest.approx(
            ranks[0][1][name], rel=5e-3
        ), name
