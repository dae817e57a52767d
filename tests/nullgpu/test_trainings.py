"""Tests each kind of training on the null device.

Each training finishes, compiles only kernels that the test at its start has tested, and never makes the host wait in a
step. torch 2.2 runs all kinds, and a current torch a few. To run all kinds on a current torch:
.venv/bin/python -m pytest tests/nullgpu -k "not a_launch"
"""

import pytest

from mamba_fsdp.importing.make_dataset import make_dataset
from mamba_fsdp.settings.dataset_config import DatasetConfig

pytestmark = pytest.mark.slow

# Each pair of context parallelism, documents, fp16, recomputing and torch.compile occurs in a row of KINDS or PARALLEL.
KINDS = {
    "every layer": {"layers": "mamba1,mamba2,mamba3,gdn,attention+mlp", "n_layer": 5},
    "documents, deterministic": {
        "layers": "mamba1,mamba2,mamba3,gdn,attention+mlp",
        "n_layer": 5,
        "reset_at_documents": "true",
        "deterministic": "true",
    },
    "documents, muon, profiled": {
        "layers": "mamba2,attention+mlp",
        "reset_at_documents": "true",
        "optimizer": "muon",
        "use_profiler": "true",
        "num_steps": "8",
    },
    "fp16, recomputed, accumulated": {
        "layers": "mamba2",
        "mixed_precision": "fp16",
        "fsdp_activation_checkpointing": "true",
        "global_batch_size": "4",
    },
    "compiled": {"layers": "mamba2", "use_torch_compile": "true"},
    "documents, fp16, recomputed, compiled": {
        "layers": "mamba2,attention+mlp",
        "reset_at_documents": "true",
        "mixed_precision": "fp16",
        "fsdp_activation_checkpointing": "true",
        "use_torch_compile": "true",
        "num_steps": "2",
    },
}
PARALLEL = {
    "ddp": {"sharding_strategy": "ddp"},
    "fsdp": {"sharding_strategy": "fsdp"},
    "hsdp, muon": {"sharding_strategy": "hsdp", "ranks": 4, "optimizer": "muon"},
    "context, documents, fp16": {
        "layers": "mamba1,mamba2,attention+mlp",
        "n_layer": 3,
        "sharding_strategy": "fsdp",
        "context_parallel": "2",
        "reset_at_documents": "true",
        "mixed_precision": "fp16",
    },
    "context, recomputed, compiled": {
        "layers": "mamba1,mamba2,attention+mlp",
        "n_layer": 3,
        "sharding_strategy": "fsdp",
        "context_parallel": "2",
        "fsdp_activation_checkpointing": "true",
        "use_torch_compile": "true",
    },
}
BOTH = ("fp16, recomputed, accumulated", "fsdp")
CUBLAS_WORKSPACE = 32 << 20  # bytes that torch allocates for cuBLAS and keeps
GOOD = {"ended": "finished", "untested": [], "waits": []}


def kinds(table):
    """Returns the keys of a table for parametrize, marked with the stacks that run them."""
    pinned = [pytest.param(kind, marks=pytest.mark.pinned) for kind in table if kind not in BOTH]
    both = [pytest.param(kind, marks=pytest.mark.torch22) for kind in table if kind in BOTH]
    return pinned + both


@pytest.mark.parametrize("kind", kinds(KINDS))
def test_a_training_compiles_nothing_untested_and_waits_nowhere(train, kind):
    """Both a new run and a resumed one compile only tested kernels, and never make the host wait during a step."""
    for report in train(**KINDS[kind]):
        assert report == GOOD | {"left": report["left"]}, report["ended"]


@pytest.mark.parametrize("kind", kinds(PARALLEL))
def test_ranks_compile_nothing_untested_and_wait_nowhere(train, kind):
    settings = {"ranks": 2, "layers": "mamba2"} | PARALLEL[kind]
    for num_steps in (2, 4) if kind == "fsdp" else (2,):
        (report,) = train(num_steps=num_steps, **settings)
        assert report == GOOD | {"left": report["left"]}, report["ended"]


@pytest.mark.pinned
def test_a_scan_that_triton_2_can_not_compile_is_refused_before_it_is_tried(train):
    """A d_state that the scan's kernels do not support with Triton 2 is an error before compilation. A signal would
    otherwise kill Triton's compiler at each start."""
    (report,) = train(num_steps=2, layers="mamba1", d_state=128)
    assert "with this Triton, the kernels support a d_state of up to 64, not 128" in report["ended"]


@pytest.mark.pinned
def test_trainings_in_one_process_free_the_memory_of_the_device(train, tmp_path):
    """A process trains three times with validation, then evaluates and generates. All kernels are tested, also in a new
    process that only evaluates and generates.

    If a training did not free its pinned memory, there would be too little for later ones.
    """
    (tmp_path / "a.txt").write_text("def line(x): return 2 * x\n" * 600)
    data = tmp_path / "data"
    options = DatasetConfig(tokenizer="train:300", validation_fraction=0.2)
    make_dataset(str(tmp_path / "a.txt"), data, options)
    settings = {"layers": "mamba1,mamba2", "n_layer": 2, "vocab_size": 300, "seq_length": 249}
    settings |= {"dataset_path": data, "use_dummy_dataset": "false", "eval_interval": 1}
    first, *later, answers = train(num_steps="2,4,6,answer", **settings)
    (alone,) = train(num_steps="answer", **settings)
    assert all(report == first for report in later)
    assert first == GOOD | {"left": first["left"]}
    assert "pinned in place" not in first["left"]
    assert first["left"]["device"] == first["left"]["tensors"] == CUBLAS_WORKSPACE
    assert answers["untested"] == alone["untested"] == []
