"""Runs a function on several ranks over gloo, each in its own process. Provides a tiny training whose results can be
compared."""

import dataclasses
import gc
import multiprocessing
import os
import pickle
import traceback

import torch
from torch.distributed import TCPStore

from mamba_fsdp.data.loader import Batch
from mamba_fsdp.model.config import ModelConfig
from mamba_fsdp.model.lm import MambaLM
from mamba_fsdp.model.spec import parameters
from mamba_fsdp.parallel.parallelize import parallelize
from mamba_fsdp.parallel.world import start_world
from mamba_fsdp.settings.train_config import OptimizerConfig, ParallelConfig, TrainConfig
from mamba_fsdp.trainer import loop, run
from mamba_fsdp.trainer.optimizer import make_optimizer
from mamba_fsdp.trainer.setup import initialize_weights
from mamba_fsdp.trainer.step_stats import sum_over_ranks
from tests.support.ports import rank_environment

RATE = 0.01
# A model whose matrices have numbers of rows that no number of ranks divides.
SMALL = ModelConfig(d_model=21, d_state=3, vocab_size=50, pad_vocab_size_multiple=1, n_layer=3)
# A rank is a daemon and can't have child processes, so Inductor must compile in the rank itself.
os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
# The server of forkserver imports torch once, so that each rank starts quickly.
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(
    [
        "fire",
        "pytest",  # this and the following are imports of the test modules with the ranks' functions
        "torch.distributed.fsdp",
        "torch.distributed.device_mesh",
        "torch._dynamo",
        "transformers.models.auto.tokenization_auto",
        "mamba_fsdp.command_line",
        "mamba_fsdp.importing.make_dataset",
        "mamba_fsdp.trainer.run",
        "mamba_fsdp.interop.convert",
        "mamba_fsdp.inference.loading",
        "mamba_fsdp.parallel.fsdp1",
        "mamba_fsdp.parallel.fsdp2",
    ]
)


def run_ranks(count, function, *arguments, launched=True, seconds=400):
    """Runs `function(world, *arguments)` on `count` ranks. Returns their results in order.

    launched: whether to set the variables of torchrun.
    Raises AssertionError with the traceback of a rank that fails.
    """
    # With port 0, the store reserves a free port.
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ranks = []
    for rank in range(count):
        receiver, sender = PROCESSES.Pipe(duplex=False)
        identity = (sender, rank, count, store.port if launched else None)
        process = PROCESSES.Process(
            target=_rank, args=(*identity, function, arguments), daemon=True
        )
        process.start()
        sender.close()
        ranks.append((process, receiver))
    try:
        results = []
        for rank, (process, receiver) in enumerate(ranks):
            assert receiver.poll(seconds), f"rank {rank} said nothing for {seconds} s"
            try:
                # Results are pickled by value, because shared tensors disappear with their rank.
                result, failure = pickle.loads(receiver.recv_bytes())
            except EOFError:
                process.join()
                result, failure = None, f"died with exit code {process.exitcode}"
            assert failure is None, f"rank {rank}: {failure}"
            results.append(result)
        return results
    finally:
        for process, _ in ranks:
            process.join(5)
            process.kill()


def _rank(sender, rank, count, port, function, arguments):
    if port:
        os.environ.update(
            rank_environment(rank, count, port),
            TORCHELASTIC_USE_AGENT_STORE="True",
            TORCHELASTIC_RESTART_COUNT="0",
        )
    torch.set_num_threads(1)
    # A garbage collection would otherwise write to, and therefore copy, all pages of the parent process.
    gc.freeze()
    try:
        world = start_world(timeout_minutes=3)
        sender.send_bytes(pickle.dumps((function(world, *arguments), None)))
        world.close()
    except BaseException:
        sender.send_bytes(pickle.dumps((None, traceback.format_exc())))


def train_whole(world, settings, **how):
    """Runs run_training with these settings on this rank, in the world that this rank already has."""

    def start_world(timeout_minutes):
        return world

    run.start_world = start_world
    return run.run_training(settings, **how)


class Scaled(MambaLM):
    """A language model with a loss that a test can multiply."""

    loss_factor = 1.0

    def forward(self, *given, **named):
        return super().forward(*given, **named) * self.loss_factor


def build(
    world,
    strategy,
    dtype=torch.float32,
    config=SMALL,
    shard_size=None,
    optimizer="adamw",
    **how,
):
    """Returns (initialized ParallelModel, its optimizer). shard_size: the number of ranks per node. how: settings of
    ParallelConfig."""
    if shard_size:
        world = dataclasses.replace(world, local_size=shard_size)
    settings = ParallelConfig(sharding_strategy=strategy, **how)
    with torch.device("meta"):
        model = Scaled(config, compute_dtype=dtype)
    parallel = parallelize(model, settings, world=world, compute_dtype=dtype)
    initialize_weights(TrainConfig(config), parallel)
    settings = OptimizerConfig(optimizer=optimizer)
    return parallel, make_optimizer(parallel, parameters(config), settings, dtype)


def tokens(step):
    return torch.randint(0, 50, (24, 9), generator=torch.Generator().manual_seed(step))


def train(world, parallel, optimizer, steps, micro_batches=2):
    """Trains the given steps in the same way as the training loop. The global batch of a step is the same on any number
    of ranks. Returns [(loss, gradient norm, whether the step was applied)]."""
    records = []
    for step in steps:
        mine = tokens(step).view(world.size, micro_batches, -1, 9)[world.rank]
        batches = [Batch(rows[:, :-1], rows[:, 1:]) for rows in mine]
        loss_sum = loop.accumulate_gradients(parallel, optimizer, batches, torch.tensor(1 / 192))
        squares = parallel.gradient_squares()
        sums = sum_over_ranks(world, loss_sum, squares, 192 / world.size, [])
        loss, norm, factor = loop.mean_loss_and_norm(sums, torch.tensor(192.0))
        applied = loop.update_weights(parallel, optimizer, loss, norm, factor, clip=0.5, lr=RATE)
        records.append((float(loss), float(norm), bool(applied)))
    return records


def whole(world, shards):
    """Returns {name: full tensor}, assembled from the shards of all ranks."""
    mine = [(shard.name, shard.shape, shard.start, shard.data.clone()) for shard in shards]
    gathered = world.broadcast_object(world.gather_on_rank0(mine))
    tensors = {name: torch.full(shape, float("nan")) for name, shape, _, _ in gathered[0]}
    for rank in gathered:
        for name, _, start, data in rank:
            tensors[name].view(-1)[start : start + data.numel()] = data
    return tensors
