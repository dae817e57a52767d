"""A rank that survives another says so in a line."""

import time

import pytest

from mamba_fsdp.run import records
from tests.support.forked import start_ranks
from tests.support.tiny import TINY, as_words


@pytest.mark.torch22
@pytest.mark.parametrize("survivor", [0, 1])
def test_a_rank_that_lost_another_ends_with_one_line(corpus, tmp_path, survivor):
    """Whichever of two ranks is killed while they train over gloo."""
    given = {"num_steps": 10_000, "dataset_path": corpus, "save_ckpt_path": tmp_path}
    words = as_words({**TINY, **given, "sharding_strategy": "fsdp"})
    ranks = start_ranks(2, words)
    try:
        while len(records.read(tmp_path / "metrics.jsonl")) < 5:
            assert ranks[0].poll() is None and ranks[1].poll() is None
            time.sleep(0.1)
        ranks[1 - survivor].kill()
        said, _ = ranks[survivor].communicate(60)
    finally:
        for rank in ranks:
            rank.kill()
    lines = said.splitlines()
    errors = [line for line in lines if line.startswith("error:")]
    assert ranks[survivor].returncode == 1
    assert errors == lines[-1:], said
    assert errors[0].startswith(f"error: rank {survivor} lost another rank"), said
    assert "by peer" in errors[0] and "Traceback" not in said
