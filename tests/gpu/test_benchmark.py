"""benchmarks.gpu, all of it but the CUDA kernels: one round with tiny models on the CPU."""

import os
import subprocess
from importlib import util

import pytest
import torch

from benchmarks.gpu import models as gpu
from config.model_config import ModelConfig
from config.presets import PRESETS
from mamba_fsdp.errors import UserError
from mamba_fsdp.model.init import initial_value
from mamba_fsdp.model.spec import parameters

CPU = torch.device("cpu")
TINY = {
    "mamba1": dict(layers="mamba1", d_model=32, n_layer=2, vocab_size=250),
    "mamba2": dict(
        layers="mamba2",
        d_model=32,
        n_layer=2,
        vocab_size=250,
        d_state=16,
        headdim=16,
        chunk_size=16,
    ),
}
MEASURED = ["ours"] if util.find_spec("mamba_ssm") else ["ours", "transformers"]


def compare(layers, **options):
    config = ModelConfig(**TINY[layers])
    weights = {
        name: initial_value(name, parameter, 0) for name, parameter in parameters(config).items()
    }
    options = dict(device=CPU, rounds=1, steps=1) | options
    return {row.backend: row for row in gpu.compare("tiny", config, weights, 24, 2, **options)}


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("layers", TINY)
def test_every_form_trains_the_same_model_or_says_why_not(layers, checkpointing):
    rows = compare(layers, activation_checkpointing=checkpointing)
    assert list(rows) == ["ours", "libraries", "mamba_ssm", "transformers"]
    for backend, row in rows.items():
        if backend in MEASURED:
            assert row.note == "" and row.tokens_per_second > 0 and row.times_ours > 0
        else:
            assert row.note and row.tokens_per_second is None
    assert rows["ours"].times_ours == 1 and "GPU" in rows["mamba_ssm"].note


@pytest.mark.slow
def test_another_model_is_noted(monkeypatch):
    """A backend that starts from other weights is no comparison: the table says so."""

    def other(config, weights, *rest):
        return gpu.our_form(config, {name: value * 1.5 for name, value in weights.items()}, *rest)

    monkeypatch.setattr(gpu, "BACKENDS", {"ours": gpu.our_form, "other": other})
    assert "not the same model" in compare("mamba1")["other"].note


@pytest.mark.slow
@pytest.mark.parametrize(
    "error, note",
    [
        (torch.cuda.OutOfMemoryError("CUDA out of memory. Tried"), "out of memory"),
        (ModuleNotFoundError("no x"), "ModuleNotFoundError: no x"),
        (UserError("why"), "why"),
        (TypeError("a\nb"), "TypeError: a"),
    ],
)
def test_a_form_that_fails_is_named_and_the_others_go_on(monkeypatch, error, note):
    def broken(*_):
        raise error

    monkeypatch.setattr(gpu, "BACKENDS", {"broken": broken, "ours": gpu.our_form})
    rows = compare("mamba1", rounds=2)
    assert rows["broken"].note == note and rows["broken"].tokens_per_second is None
    assert rows["ours"].tokens_per_second > 0 and rows["ours"].note == ""


def test_fused_operators_are_counted_once_each():
    class MambaInnerFn(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 1

        @staticmethod
        def backward(ctx, grad):
            return grad

    x = torch.ones(2, requires_grad=True)
    once = MambaInnerFn.apply(x)
    assert gpu.count_fused((once + MambaInnerFn.apply(once) + once).sum()) == 2
    assert gpu.count_fused((x * 2).sum()) == 0


@pytest.mark.slow
def test_the_command_ends_with_a_table_that_says_where_it_comes_from(monkeypatch, capsys):
    monkeypatch.setitem(PRESETS, "tiny", TINY["mamba1"])
    monkeypatch.setattr(gpu, "BACKENDS", {"ours": gpu.our_form, "mamba_ssm": gpu.mamba_ssm_form})
    assert (
        gpu.main(
            ["--presets=tiny", "--lengths=8,16", "--batch=1", "--rounds=1", "--steps=1"], device=CPU
        )
        == 0
    )
    described, table = capsys.readouterr().out.split("\n\n")[-2:]
    for word in ("Machine: ", "Commit: ", "Command: `python -m benchmarks.gpu --presets=tiny"):
        assert word in described
    lines = table.splitlines()
    assert len(lines) == 2 + 2 * 2 and {line.count("|") for line in lines} == {10}
    assert [line.split(" | ")[1] for line in lines[2:]] == ["8", "8", "16", "16"]


def test_mistakes_are_one_line(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for arguments, word in (([], "CUDA"), (["--presets=mamba-131m"], "mamba-130m")):
        assert gpu.main(arguments) == 2
        message = capsys.readouterr().err
        assert message.startswith("error: ") and word in message and message.count("\n") == 1


PYTHON = """#!/bin/sh
# Stands in for `python -m pip`: makes a wheel of nothing, says what a compiler says, names what it should install.
for last; do :; done
case " $* " in
*" wheel "*)
    while [ "$1" != --wheel-dir ]; do shift; done
    touch "$2/${last##*/}.whl" && echo "Compiling for 'sm_90'" ;;
*) for last; do case $last in *.whl) echo "${last##*/}" >>"$0.installed" ;; esac; done ;;
esac
"""


def test_setup_installs_what_was_carried_and_the_kernels_for_this_gpu(project, tmp_path):
    for package in ("causal_conv1d-1.7.0", "mamba_ssm-2.3.1"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "setup.py").write_text(
            "if True:\n    # HACK: The compiler flag\n    pass\n"
        )
        subprocess.run(["tar", "-czf", f"{package}.tar.gz", package], cwd=tmp_path, check=True)
    (tmp_path / "einops.whl").touch()
    python = tmp_path / "python"
    python.write_text(PYTHON)
    python.chmod(0o755)
    nvcc = tmp_path / "bin" / "nvcc"
    nvcc.parent.mkdir()
    nvcc.symlink_to("/bin/true")
    command = [project / "benchmarks/gpu_setup.sh", tmp_path, tmp_path / "target"]
    environment = os.environ | {"PYTHON": str(python), "CUDA_HOME": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "python.installed").read_text().split() == [
        "einops.whl",
        "causal-conv1d.whl",
        "mamba-ssm.whl",
    ]
