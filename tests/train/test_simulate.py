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


HYBRID = "2*mamba2+mlp,attention+mlp"


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
