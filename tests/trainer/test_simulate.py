"""Tests benchmarks.simulate, which runs a whole step on a simulated GPU and in a simulated process group of up to 128
ranks."""

from collections import Counter

import pytest
import torch

from benchmarks.simulate import simulate
from mamba_fsdp.model.config import ModelConfig
from mamba_fsdp.model.spec import operator_uses
from mamba_fsdp.ops.backends import resolve_backends
from mamba_fsdp.parallel.world import CPU, World
from mamba_fsdp.planning.memory import Workload, expected_memory
from mamba_fsdp.settings.train_config import TrainConfig

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    "size, layers, recompute, sharing, length",
    [
        (1, "mamba1,mamba3,gdn", "", 1, 1024),
        (8, "attention+mlp", "1", 1, 2048),
        (128, "2*mamba1,mamba2+mlp,mamba2,attention", "1/2", 1, 1024),
        (16, "mamba1,mamba2,attention+mlp", "", 8, 8192),
    ],
)
def test_the_memory_of_a_device_equals_the_estimate(size, layers, recompute, sharing, length):
    """The estimated memory of weights, gradients, moments and temporary tensors, which are mostly activations, is
    within 3 % of the simulated one.

    A step has two micro-batches, so the gradients of the first one exist while the second one has its activations.
    """
    settings = TrainConfig(
        ModelConfig(
            layers=layers,
            n_layer=5,
            d_model=512,
            vocab_size=4096,
            n_head=8,
            n_kv_head=4,
            d_state=128,
        )
    )
    settings = settings.with_values(
        seq_length=length,
        mixed_precision="bf16",
        context_parallel=sharing,
        batch_size=8,
        global_batch_size=16 * size // sharing,
    )
    if recompute:
        settings = settings.with_values(
            fsdp_activation_checkpointing=True, selective_checkpointing=recompute
        )
    found = simulate(settings, size, rank=sharing - 1, inside=True).peak
    uses = operator_uses(settings.model, torch.bfloat16, in_parts=sharing > 1)
    backends = resolve_backends("auto", "cuda", uses, assumed=("triton",)).backends
    expected = expected_memory(Workload(settings, World(0, size, min(8, size), CPU), backends))
    for part in ("weights", "gradients", "moments"):
        assert found[part] == pytest.approx(expected[part], rel=0.03), part
    passing = expected["gathered"] + expected["activations"] + expected["loss"]
    assert passing == pytest.approx(found["passing"], rel=0.03)


def test_context_parallel_ranks_send_states_last_inputs_and_keys():
    """Ranks that share sequences send only states, the last inputs of convolutions, and keys and values. They send
    these tensors once in the forward pass, and the gradients of these tensors once in the backward pass. Only the size
    of the keys and values depends on the length.

    Besides the collectives for weights and gradients, a step has a single small collective.
    """
    sharing = 4
    settings = TrainConfig(
        ModelConfig(
            layers="mamba1,mamba2,attention",
            n_layer=3,
            d_model=128,
            vocab_size=512,
            n_head=4,
            n_kv_head=2,
        )
    )
    settings = settings.with_values(seq_length=1024, batch_size=2, context_parallel=sharing)
    found = simulate(settings, 8, rank=1).collectives
    (small,) = [each for each in found if each.dtype == torch.float64]
    assert small.name == "allreduce_" and small.ranks == 8 and small.numel < 20
    sent = Counter((each.name, each.dtype, each.numel) for each in found if each.ranks == sharing)
    rows = 2
    model = settings.model
    bf16, fp32 = torch.bfloat16, torch.float32
    inputs = {
        "mamba1": rows * (model.d_conv - 1) * model.d_inner,
        "mamba2": rows * (model.d_conv - 1) * (model.d_inner + 2 * model.d_state),
    }
    state = rows * model.d_inner * model.d_state
    keys = rows * settings.data.seq_length * 2 * model.n_kv_head * model.resolved_head_dim
    expected = Counter()
    for elements in inputs.values():
        expected[("send", bf16, elements)] += 2
        expected[("recv_", bf16, elements)] += 2
    for decays in (state, rows * model.n_ssm_head):
        expected[("_allgather_base_", fp32, sharing * (state + decays))] += 1
        expected[("_allgather_base_", fp32, sharing * state)] += 1
    expected[("_allgather_base_", bf16, keys)] += 1
    expected[("_reduce_scatter_base_", fp32, keys)] += 1
    assert sent == expected


@pytest.mark.parametrize("unsharded, times", [(False, 3), (True, 1)])
def test_gradients_are_reduced_for_each_micro_batch_or_once(unsharded, times):
    """By default, gradients are reduced after each micro-batch, so that each rank stores only its shard. With
    accumulate_unsharded, they are reduced once, after the last micro-batch."""
    settings = TrainConfig(ModelConfig(d_model=64, n_layer=2, vocab_size=512))
    settings = settings.with_values(seq_length=64, batch_size=1, global_batch_size=12)
    found = simulate(settings.with_values(accumulate_unsharded=unsharded), 4).collectives
    sent = Counter(each.numel for each in found if each.name == "_reduce_scatter_base_")
    blocks = 2
    assert {*sent.values()} <= {times, blocks * times}
