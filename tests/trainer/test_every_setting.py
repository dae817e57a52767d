"""Every setting changes something: a tiny run with another value leaves other traces than the same run without it."""

import importlib
import shutil
import sys
from numbers import Number
from types import SimpleNamespace

import pytest
import torch

from mamba_fsdp.errors import UserError
from mamba_fsdp.parallel import compat, parallelize
from mamba_fsdp.settings import resolve

# For each setting another value, and what else must be set for it to matter. Where the effect is speed or memory, the
# trace is the argument that reaches the library which obeys it.
OTHER_VALUES = {
    "model_name": ("mamba-130m", {"n_layer": 1, "global_batch_size": 2}),
    "d_model": (32, {}),
    "n_layer": (1, {}),
    "layers": ("mamba2", {"headdim": 8}),
    "vocab_size": (80, {}),
    "pad_vocab_size_multiple": (128, {}),
    "tie_embeddings": (False, {}),
    "norm_eps": (0.1, {}),
    "d_state": (8, {}),
    "d_conv": (2, {}),
    "expand": (1, {}),
    "d_ssm": (24, {}),
    "dt_rank": (3, {}),
    "bcdt_norm_eps": (1e-6, {}),
    "headdim": (16, {"layers": "mamba2"}),
    "ngroups": (2, {"layers": "mamba2", "headdim": 8}),
    "chunk_size": (16, {"layers": "mamba2", "headdim": 8}),
    "ssm_norm": ("none", {"layers": "mamba2", "headdim": 8}),
    "decay_activation": ("softplus", {"layers": "mamba3", "headdim": 8}),
    "n_head": (2, {"layers": "attention", "n_kv_head": 1}),
    "n_kv_head": (2, {"layers": "attention", "n_head": 4}),
    "head_dim": (16, {"layers": "attention", "n_head": 4, "n_kv_head": 4}),
    "rotary_dim": (0, {"layers": "attention", "n_head": 4, "n_kv_head": 4}),
    "rope_theta": (100, {"layers": "attention", "n_head": 2, "n_kv_head": 2}),
    "rope_scaling": ("linear,factor=2", {"layers": "attention", "n_head": 2, "n_kv_head": 2}),
    "d_intermediate": (24, {"layers": "mamba1+mlp"}),
    "mlp_activation": ("relu2", {"layers": "mamba1+mlp"}),
    "multipliers": ("embedding=3,ssm_out=0.5", {}),
    "use_dummy_dataset": (True, {}),
    "dataset_path": ("{corpus}/other", {}),
    "datasets": ("other", {}),
    "weights": ("1,5", {"datasets": "train,other"}),
    "validation_path": ("none", {}),
    "allow_other_tokenizer": (True, {"datasets": "train,foreign"}),
    "seq_length": (16, {}),
    "reset_at_documents": (True, {}),
    "num_workers": (3, {}),
    "position_weighting": (True, {}),
    "position_window": (2, {"position_weighting": True}),
    "prefetch": (1, {}),
    "optimizer": ("muon", {}),
    "learning_rate": (0.02, {}),
    "weight_decay": (0.5, {}),
    "beta1": (0.5, {}),
    "beta2": (0.5, {}),
    "adam_epsilon": (0.1, {}),
    "grad_clip_thresh": (0.01, {}),
    "schedule": ("linear", {}),
    "warmup_steps": (3, {}),
    "warmup_ratio": (0.5, {}),
    "polynomial_power": (2.0, {"schedule": "polynomial"}),
    "restart_cycles": (2, {"schedule": "cosine_with_restarts"}),
    "decay_steps": (3, {"schedule": "wsd"}),
    "schedule_steps": (3, {}),
    "min_learning_rate_ratio": (0.5, {}),
    "num_epochs": (0.01, {}),
    "num_steps": (3, {}),
    "gradient_accumulation_steps": (2, {}),
    "batch_size": (1, {}),
    "global_batch_size": (4, {}),
    "seed": (1, {}),
    "mixed_precision": ("bf16", {}),
    "kernels": ("auto", {}),
    "deterministic": (True, {}),
    "dry_run": (True, {}),
    "max_skipped_steps": (2, {}),
    "eval_interval": (2, {}),
    "eval_batches": (1, {}),
    "save_ckpt_path": ("{run}/elsewhere", {}),
    "load_ckpt_path": ("{first}", {}),
    "resuming_dataset": (True, {"load_ckpt_path": "{first}"}),
    "init_from": (None, {}),
    "checkpoint_interval": (3, {}),
    "keep_checkpoints": (1, {}),
    "keep_every": (2, {"keep_checkpoints": 1}),
    "max_failed_saves": (None, {}),
    "async_checkpoint": (False, {}),
    "publish": (False, {}),
    "sharding_strategy": ("fsdp", {}),
    "fsdp_activation_checkpointing": (True, {}),
    "selective_checkpointing": ("1/2", {"fsdp_activation_checkpointing": True}),
    "accumulate_unsharded": (True, {"sharding_strategy": "fsdp"}),
    "context_parallel": (2, {}),
    "use_torch_compile": (True, {}),
    "timeout_minutes": (3, {}),
    "report_interval": (3, {}),
    "tracker": ("tensorboard", {}),
    "wandb_project": ("mine", {"tracker": "wandb"}),
    "wandb_name": ("mine", {"tracker": "wandb"}),
    "use_profiler": (None, {}),  # test_profiling.py
}


def test_the_table_names_every_setting():
    assert OTHER_VALUES.keys() == resolve.all_settings().keys()


@pytest.fixture(scope="module")
def kept_runs(tmp_path_factory):
    """(a folder for the runs, which traces name; the traces of runs without a setting, by the others that it needs)."""
    return tmp_path_factory.mktemp("settings"), {}


@pytest.fixture
def traces(train, kept_runs, metrics_of, corpus, monkeypatch):
    """traces(settings) -> all that a run with them can be told by."""
    from mamba_fsdp.checkpoint.checkpointer import Checkpointer
    from mamba_fsdp.data import loader
    from mamba_fsdp.trainer import run, setup

    sharding = importlib.import_module(compat.load_shard().__module__)

    calls = []

    def told(value):
        if isinstance(value, torch.nn.Module):
            return next(value.parameters()).device
        return value if isinstance(value, (Number, str)) else None

    for where, name in [
        (setup, "parallelize"),
        (setup, "Checkpointer"),
        (setup, "Loader"),
        (loader, "ThreadPoolExecutor"),
        (run, "start_world"),
        (parallelize, "checkpoint_blocks"),
        (sharding, "shard"),
    ]:
        original = getattr(where, name)

        def recording(*args, _name=name, _original=original, **kwargs):
            given = (
                [told(value) for value in args],
                {key: told(value) for key, value in kwargs.items()},
            )
            calls.append((_name, *given))
            return _original(*args, **kwargs)

        monkeypatch.setattr(where, name, recording)

    def step(reader, number, _step=loader.Loader.step):
        batches = _step(reader, number)
        calls.append(("read ahead", sorted(reader.ahead)))
        return batches

    monkeypatch.setattr(loader.Loader, "step", step)

    def save(checkpointer, step, shards, state, _save=Checkpointer.save):
        calls.append(("save", step))
        _save(checkpointer, step, shards, state)

    monkeypatch.setattr(Checkpointer, "save", save)
    monkeypatch.setattr(
        run.torch,
        "use_deterministic_algorithms",
        lambda flag: calls.append(("deterministic", flag)),
    )
    wandb = SimpleNamespace(log=lambda values, step: None, finish=lambda: None, resumed=False)
    wandb.setup = lambda: SimpleNamespace(settings=SimpleNamespace(mode="offline"))
    wandb.init = lambda project, name, **_: calls.append(("wandb", project, name)) or wandb
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    root, _ = kept_runs
    monkeypatch.setattr(
        "mamba_fsdp.parallel.parallelize.compile_blocks", lambda blocks: calls.append("compile")
    )
    if not (root / "first").exists():
        train(root / "first", num_steps=2)

    def run_with(given):
        calls.clear()
        folder = root / "run"
        shutil.rmtree(folder, ignore_errors=True)
        fill = {"corpus": corpus, "first": root / "first", "run": folder}
        try:
            said = train(folder, **{key: str(value).format(**fill) for key, value in given.items()})
        except UserError as error:
            said = str(error)
        files = sorted(
            str(path.relative_to(folder)).replace(
                path.name, "events" if "tfevents" in path.name else path.name
            )
            for path in folder.rglob("*")
            if not path.name.startswith(".")
        )
        where = folder if (folder / "metrics.jsonl").exists() else folder / "elsewhere"
        kept = [line for line in said.splitlines() if not line.startswith("step")]
        return (
            files,
            metrics_of(where) if (where / "metrics.jsonl").exists() else said,
            kept,
            list(map(str, calls)),
        )

    return run_with


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        name
        for name in OTHER_VALUES
        if OTHER_VALUES[name][0] is not None and name != "max_skipped_steps"
    ],
)
def test_a_setting_changes_something(traces, kept_runs, name):
    value, needed = OTHER_VALUES[name]
    needed = needed if name in ("num_steps", "num_epochs") else {"num_steps": 6, **needed}
    _, usual = kept_runs
    if str(needed) not in usual:
        usual[str(needed)] = traces(needed)
        again = traces(needed)
        assert usual[str(needed)] == again, "equal runs differ in their traces, which prove nothing"
    assert traces({**needed, name: value}) != usual[str(needed)]
