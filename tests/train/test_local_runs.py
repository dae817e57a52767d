"""Runs with a local tier: what a kill -9 of all ranks and a lost disk cost."""

import itertools
import random
import shutil
import signal
import time

import pytest
import torch
from forked import said_by, start_ranks

LOCAL = {
    "num_steps": 30,
    "checkpoint_interval": 100,
    "local_checkpoint_interval": 2,
    "global_batch_size": 4,
    "batch_size": 1,
    "eval_interval": 0,
    "schedule": "constant",
}


@pytest.fixture
def start_nodes(corpus, tiny_file, tmp_path):
    """start_nodes(run, nodes, per_node, **settings) -> as the Popens of all ranks, each node with a disk of its own."""
    started = []

    def start(run, nodes, per_node, **given):
        words = {
            "config": tiny_file,
            "dataset_path": corpus,
            "save_ckpt_path": run,
            "local_checkpoint_path": f"{tmp_path}/disk$GROUP_RANK",
            **LOCAL,
            **given,
        }
        words = [f"--{key}={value}" for key, value in words.items() if value != ""]
        started.append(start_ranks(nodes * per_node, words, per_node))
        return started[-1]

    yield start
    for rank in itertools.chain(*started):
        rank.kill()


@pytest.mark.slow
@pytest.mark.parametrize("per_node, strategy", [(1, "fsdp"), (2, "hsdp")])
def test_all_ranks_killed_and_a_disk_lost_cost_only_the_steps_since_the_last_local_checkpoint(
    start_nodes, tmp_path, weights_of, metrics_of, per_node, strategy
):
    """No shared checkpoint is there: what the lost disk held comes from the other node, bit for bit."""
    how = {"sharding_strategy": strategy}
    said_by(
        start_nodes(
            tmp_path / "whole",
            2,
            per_node,
            **how,
            local_checkpoint_path="",
            local_checkpoint_interval="",
        )
    )
    run, disks = tmp_path / "run", [tmp_path / "disk0", tmp_path / "disk1"]
    ranks = start_nodes(run, 2, per_node, **how, num_steps=10**6)
    while len(list(tmp_path.glob("disk1/*/*/step_*/COMMIT"))) < 2:
        assert ranks[0].poll() is None, ranks[0].communicate()[0]
        time.sleep(0.02)
    time.sleep(random.random() / 2)
    for rank in ranks:
        rank.send_signal(signal.SIGKILL)
        rank.wait()
    assert not list(run.glob("checkpoints/step_*"))
    shutil.rmtree(disks[random.randrange(2)])
    last = max(
        path.name for path in tmp_path.glob("disk*/*/*/step_*")
    )  # the kill may have come between the disks
    said = said_by(start_nodes(run, 2, per_node, **how))
    assert f"{last}, step {int(last[5:])}" in said
    assert f'"from": "checkpoint {last}"' in (run / "events.jsonl").read_text()
    assert [entry["loss"] for entry in metrics_of(run)] == [
        entry["loss"] for entry in metrics_of(tmp_path / "whole")
    ]
    whole, resumed = weights_of(tmp_path / "whole"), weights_of(run)
    assert whole.keys() == resumed.keys() and all(
        torch.equal(whole[name], resumed[name]) for name in whole
    )
