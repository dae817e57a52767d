"""What holds for each kind of training on a GPU, seen on the null device: it runs to its end, training compiles nothing
that the check at its start has not tested, and the host waits nowhere in a step. Each kind on torch 2.2, a few on a current one;
all there too, by hand: .venv/bin/python -m pytest tests/nullgpu -k "not a_launch"."""

import pytest

pytestmark = pytest.mark.slow

KINDS = {
    "mamba1": {"layers": "mamba1"},
    "mamba2": {"layers": "mamba2"},
    "mamba3": {"layers": "mamba3"},
    "gdn": {"layers": "gdn"},
    "hybrid, documents": {
        "layers": "mamba2,attention+mlp",
        "reset_at_documents": "true",
    },
    "fp16": {"layers": "mamba1,mamba2", "mixed_precision": "fp16"},
    "muon": {"layers": "mamba2", "optimizer": "muon"},
    "deterministic": {"layers": "mamba2", "deterministic": "true"},
    "compiled": {"layers": "mamba2", "use_torch_compile": "true"},
    "profiled": {"layers": "mamba2", "use_profiler": "true", "num_steps": "8"},
    "recomputed, accumulated": {
        "layers": "mamba1",
        "fsdp_activation_checkpointing": "true",
        "global_batch_size": "4",
    },
}


PARALLEL = {
    "ddp": {"sharding_strategy": "ddp"},
    "fsdp": {"sharding_strategy": "fsdp"},
    "hsdp": {"sharding_strategy": "hsdp", "ranks": 4},
    "context": {"sharding_strategy": "fsdp", "context_parallel": "2"},
}
BOTH = ("fp16", "hybrid, documents", "fsdp")
GOOD = {"ended": "finished", "untested": [], "waits": []}


def kinds(table):
    """The rows of a table, for parametrize."""
    pinned = [pytest.param(kind, marks=pytest.mark.pinned) for kind in table if kind not in BOTH]
    both = [pytest.param(kind, marks=pytest.mark.torch22) for kind in table if kind in BOTH]
    return pinned + both


@pytest.mark.parametrize("kind", kinds(KINDS))
def test_a_training_compiles_nothing_untested_and_waits_nowhere(train, kind):
    """From its start, and from a checkpoint."""
    for report in train(**KINDS[kind]):
        assert report == GOOD | {"left": report["left"]}


@pytest.mark.parametrize("kind", kinds(PARALLEL))
def test_ranks_compile_nothing_untested_and_wait_nowhere(train, kind):
    settings = {"ranks": 2, "layers": "mamba2"} | PARALLEL[kind]
    for num_steps in (2, 4):
        (report,) = train(num_steps=num_steps, **settings)
        assert report == GOOD | {"left": report["left"]}


@pytest.mark.pinned
def test_trainings_in_one_process_give_back_what_they_took(train):
    """The memory that is pinned for saves above all: later trainings would find no other."""
    first, second, third = train(num_steps="2,4,6", layers="mamba2", n_layer=8)
    assert first["ended"] == second["ended"] == third["ended"] == "finished"
    assert "pinned in place" not in first["left"]
    assert third["left"] == second["left"]
