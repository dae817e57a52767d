"""The whole step of every preset on a GPU that is none, in a process group of up to 1,024 ranks that is none either."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException

from benchmarks.simulate import simulate
from config.model_config import ModelConfig
from config.presets import PRESETS, preset
from config.train_config import TrainConfig
from mamba_fsdp.model.spec import operator_uses
from mamba_fsdp.ops.backends import resolve_backends
from mamba_fsdp.parallel.world import CPU, World
from mamba_fsdp.planning.memory import expected_memory
from mamba_fsdp.train import loop

pytestmark = pytest.mark.slow
HERE = Path(__file__).resolve().parent


# Of each shape of layer the largest and what differs in its outer parts; SIMULATE=all takes all presets.
CHOSEN = [
    name
    for name in PRESETS
    if os.environ.get("SIMULATE") == "all"
    or name
    in {
        "demo",
        "mamba-2.8b",
        "mamba2-2.7b",
        "mamba_9.8b",
        "mambaoutai",
        "llama2_7b",
        "llama2_70b",
        "llama3_1.8b",
    }
]


def shallow(name):
    """The preset with one layer of each kind that it has."""
    given = preset(name)
    kinds = dict.fromkeys(
        kind.partition("*")[2] or kind for kind in ModelConfig(**given).layers.split(",")
    )
    return {**given, "layers": ",".join(kinds), "n_layer": len(kinds)}


def settings_of(name):
    settings = TrainConfig()
    settings.model = ModelConfig(**shallow(name))
    settings.data.seq_length, settings.training.batch_size = 8, 2
    return settings


@pytest.fixture(scope="module")
def on_gpu(tmp_path_factory):
    """on_gpu(cases) -> what simulate says of each, on a fake cuda device."""
    compiler = shutil.which("g++")
    if not compiler:
        pytest.skip("no g++ to make a GPU of")
    library, root = tmp_path_factory.mktemp("gpu") / "fake_gpu.so", Path(torch.__file__).parent
    subprocess.run(
        [
            compiler,
            "-std=c++20",
            "-shared",
            "-fPIC",
            f"-I{root}/include",
            f"-L{root}/lib",
            HERE / "fake_gpu.cpp",
            "-o",
            library,
            "-lc10",
            "-ltorch_cpu",
        ],
        check=True,
    )

    def run(cases):
        done = subprocess.run(
            [
                sys.executable,
                HERE.parent / "support/on_fake_gpu.py",
                library,
                *map(json.dumps, cases),
            ],
            capture_output=True,
            text=True,
            cwd=HERE.parent.parent,
            env={**os.environ, "PYTHONPATH": str(HERE.parent.parent), "OMP_NUM_THREADS": "1"},
        )
        assert done.returncode == 0, done.stderr[-3000:]
        return [json.loads(line) for line in done.stdout.splitlines()]

    return run


def test_the_step_of_presets_on_a_thousand_gpus(on_gpu):
    """Nothing in it asks for a number or mixes devices; each unit's weights are gathered in bf16 twice (what lies
    outside the blocks, once) and its gradients reduced in fp32; then the one small collective."""
    cases = [{"model": shallow(name), "size": 1024, "rank": 0} for name in CHOSEN]
    for name, case, found in zip(CHOSEN, cases, on_gpu(cases)):
        config = ModelConfig(**case["model"])
        *large, last = found["collectives"]
        assert last == ["allreduce_", "torch.float64", 8 + 1024, 1024]
        assert large and {ranks for *_, ranks in large} == {1024}
        gathered = [
            numel
            for name, dtype, numel, _ in large
            if (name, dtype) == ("_allgather_base_", "torch.bfloat16")
        ]
        reduced = [
            numel
            for name, dtype, numel, _ in large
            if (name, dtype) == ("_reduce_scatter_base_", "torch.float32")
        ]
        whole = [(name, numel) for name, dtype, numel, _ in large if name == "allreduce_"]
        assert (
            sorted(gathered) == sorted(reduced + reduced[:-1])
            and len(reduced) == config.n_layer + 1
        )
        assert len(large) == len(gathered) + len(reduced) + len(whole) and len(whole) <= 1
        expected = expected_memory(settings_of(name), World(0, 1024, 0, 8, CPU), {})
        assert (found["peak"]["weights"], found["peak"]["moments"]) == (
            expected["weights"],
            expected["moments"],
        )


HYBRID = "2*mamba2+mlp,attention+mlp"


@pytest.mark.parametrize(
    "size, layers, recompute",
    [
        (8, "mamba1", ""),
        (1024, "mamba1", "1"),
        (1024, "mamba2", ""),
        (8, "mamba2", "1"),
        (1024, "attention+mlp", ""),
        (1, "attention+mlp", "1"),
        (8, HYBRID, ""),
        (1024, HYBRID, "1/2"),
    ],
)
def test_what_a_device_holds_is_what_was_expected(size, layers, recompute):
    """Weights, gradients and moments within 5 %; what comes and goes (of it most are activations) within 15 %. Two
    micro-batches: the gradients of the first are there while the second has its activations."""
    settings = settings_of("demo")
    settings.model = ModelConfig(
        layers=layers,
        n_layer=6,
        d_model=512,
        vocab_size=4096,
        n_head=8,
        n_kv_head=4,
        d_state=16 if layers == "mamba1" else 128,
    )
    settings.data.seq_length, settings.training.batch_size, settings.training.global_batch_size = (
        2048,
        8,
        16 * size,
    )
    if recompute:
        (
            settings.parallel.fsdp_activation_checkpointing,
            settings.parallel.selective_checkpointing,
        ) = True, recompute
    found = simulate(settings, size, inside=True).peak
    backends = resolve_backends(
        "auto", "cuda", operator_uses(settings.model, torch.bfloat16), assumed=("triton",)
    ).backends
    expected = expected_memory(settings, World(0, size, 0, min(8, size), CPU), backends)
    for part in ("weights", "gradients", "moments"):
        assert found[part] == pytest.approx(expected[part], rel=0.05), part
    passing = expected["gathered"] + expected["activations"] + expected["loss"]
    assert (
        passing == pytest.approx(found["passing"], rel=0.15)
        and expected["activations"] > 0.6 * passing
    )


RANKS = [(1, 0), (8, 0), (8, 7), (1024, 0), (1024, 511), (1024, 1023)]


def test_all_ranks_send_the_same_in_the_same_order(on_gpu):
    fp16 = {"training": {"mixed_precision": "fp16"}}
    found = on_gpu(
        [
            {"model": shallow("mamba_9.8b"), "size": size, "rank": rank, "settings": fp16}
            for size, rank in RANKS
        ]
    )
    sent = {place: each["collectives"] for place, each in zip(RANKS, found)}
    held = {place: sum(each["peak"].values()) for place, each in zip(RANKS, found)}
    assert sent[1, 0] == [] and sent[8, 0] and sent[1024, 0]
    for size, rank in RANKS:
        assert sent[size, rank] == sent[size, 0] and held[size, rank] <= held[size, 0]
    assert held[1024, 0] < held[8, 0] < held[1, 0]


def test_a_step_that_asks_for_a_number_is_found(monkeypatch):
    true_loss = loop.batch_loss
    for question in (torch.Tensor.item, torch.nonzero, lambda loss: bool(loss.isfinite())):

        def asking(*batch, question=question):
            loss = true_loss(*batch)
            question(loss)
            return loss

        monkeypatch.setattr(loop, "batch_loss", asking)
        with pytest.raises(
            (DataDependentOutputException, RuntimeError), match="aten|data-dependent"
        ):
            simulate(settings_of("demo"), 2)
    monkeypatch.setattr(loop, "batch_loss", true_loss)
    assert simulate(settings_of("demo"), 2, rank=1).collectives


def test_micro_batches_and_documents(monkeypatch):
    """Four micro-batches reduce their gradients each, or with accumulate_unsharded once; one small collective still."""
    settings = settings_of("demo")
    settings.training.global_batch_size, settings.data.reset_at_documents = 4 * 2 * 2, True
    counts = {}
    for unsharded in (False, True):
        settings.parallel.accumulate_unsharded = unsharded
        names = [each.name for each in simulate(settings, 2).collectives]
        counts[unsharded] = names.count("_reduce_scatter_base_")
        assert names[-1] == "allreduce_"
    assert counts[False] == 4 * counts[True]
