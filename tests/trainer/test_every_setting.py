"""Every setting changes what a run does: with another value it has other losses, leaves other files or says something else."""

import re
import shutil
import sys
from types import SimpleNamespace

import pytest
import torch

from mamba_fsdp.errors import UserError
from mamba_fsdp.settings import resolve

# What must be set for the settings of these sections to matter: one short run for as many as possible.
USUAL = {"num_steps": 3, "eval_interval": 0, "checkpoint_interval": 9, "publish": False}
HYBRID = {
    **USUAL,
    "num_steps": 1,
    "n_layer": 4,
    "layers": "mamba1,mamba2,mamba3,attention+mlp",
    "headdim": 8,
    "n_head": 4,
    "n_kv_head": 2,
}
VALIDATED = {**USUAL, "num_steps": 2, "eval_interval": 1}
SAVED = {**USUAL, "num_steps": 5, "checkpoint_interval": 1, "keep_checkpoints": 2}
MIXED = {**USUAL, "datasets": "train,other"}
# For each setting another value, and what the two runs have in common.
OTHER_VALUES = {
    "model_name": ("mamba-130m", {**USUAL, "n_layer": 1, "global_batch_size": 2}),
    "d_model": (32, HYBRID),
    "n_layer": (3, HYBRID),
    "layers": ("mamba1,mamba2,mamba3+mlp,attention", HYBRID),
    "vocab_size": (80, HYBRID),
    "pad_vocab_size_multiple": (128, HYBRID),
    "tie_embeddings": (False, HYBRID),
    "norm_eps": (0.1, HYBRID),
    "d_state": (8, HYBRID),
    "d_conv": (2, HYBRID),
    "expand": (1, HYBRID),
    "d_ssm": (24, HYBRID),
    "dt_rank": (3, HYBRID),
    "bcdt_norm_eps": (1e-6, HYBRID),
    "headdim": (16, HYBRID),
    "ngroups": (2, HYBRID),
    "chunk_size": (16, HYBRID),
    "ssm_norm": ("none", HYBRID),
    "decay_activation": ("softplus", HYBRID),
    "n_head": (2, HYBRID),
    "n_kv_head": (4, HYBRID),
    "head_dim": (16, HYBRID),
    "rotary_dim": (0, HYBRID),
    "rope_theta": (100, HYBRID),
    "rope_scaling": ("linear,factor=2", HYBRID),
    "d_intermediate": (24, HYBRID),
    "mlp_activation": ("relu2", HYBRID),
    "multipliers": ("embedding=3,ssm_out=0.5", HYBRID),
    "use_dummy_dataset": (True, USUAL),
    "dataset_path": ("{corpus}/other", USUAL),
    "datasets": ("other", USUAL),
    "weights": ("1,5", MIXED),
    "validation_path": ("none", VALIDATED),
    "allow_other_tokenizer": (True, {**USUAL, "datasets": "train,foreign"}),
    "seq_length": (16, USUAL),
    "reset_at_documents": (True, USUAL),
    "position_weighting": (True, USUAL),
    "position_window": (2, {**USUAL, "position_weighting": True}),
    "optimizer": ("muon", USUAL),
    "learning_rate": (0.02, USUAL),
    "weight_decay": (0.5, USUAL),
    "beta1": (0.5, USUAL),
    "beta2": (0.5, USUAL),
    "adam_epsilon": (0.1, USUAL),
    "grad_clip_thresh": (0.01, USUAL),
    "schedule": ("linear", USUAL),
    "warmup_steps": (3, USUAL),
    "warmup_ratio": (0.9, USUAL),
    "polynomial_power": (2.0, {**USUAL, "schedule": "polynomial"}),
    "restart_cycles": (2, {**USUAL, "schedule": "cosine_with_restarts"}),
    "decay_steps": (3, {**USUAL, "schedule": "wsd"}),
    "schedule_steps": (9, USUAL),
    "min_learning_rate_ratio": (0.5, USUAL),
    "num_epochs": (0.01, USUAL),
    "num_steps": (2, USUAL),
    "gradient_accumulation_steps": (2, USUAL),
    "batch_size": (1, USUAL),
    "global_batch_size": (4, USUAL),
    "seed": (1, USUAL),
    "mixed_precision": ("bf16", USUAL),
    "kernels": ("auto", USUAL),
    "deterministic": (True, USUAL),
    "eval_interval": (2, VALIDATED),
    "eval_batches": (1, VALIDATED),
    "checkpoint_interval": (3, SAVED),
    "keep_checkpoints": (1, SAVED),
    "keep_every": (2, SAVED),
    "publish": (True, USUAL),
    "sharding_strategy": ("fsdp", USUAL),
    "use_torch_compile": (True, USUAL),
    "report_interval": (3, USUAL),
    "tracker": ("tensorboard", USUAL),
    "wandb_project": ("mine", {**USUAL, "tracker": "wandb"}),
    "wandb_name": ("mine", {**USUAL, "tracker": "wandb"}),
}
# Those whose effect takes more than a short run of one process, and the test that shows it.
SHOWN_BY = {
    "num_workers": "data/test_loader.py::test_threads_read_as_many_steps_ahead_as_they_are_told",
    "prefetch": "data/test_loader.py::test_threads_read_as_many_steps_ahead_as_they_are_told",
    "fsdp_activation_checkpointing": "parallel/test_strategies.py::test_the_chosen_share_of_blocks_recomputes",
    "selective_checkpointing": "parallel/test_strategies.py::test_the_chosen_share_of_blocks_recomputes",
    "accumulate_unsharded": "parallel/test_strategies.py::test_gradients_travel_when_they_should",
    "context_parallel": "trainer/test_ranks.py::test_any_ranks_and_strategies_in_turn_give_the_losses_of_one_process",
    "timeout_minutes": "trainer/test_ranks.py::test_a_rank_that_waits_in_vain_ends_with_where_it_stands",
    "dry_run": "trainer/test_runs.py::test_a_dry_run_says_what_is_coming_and_writes_nothing",
    "max_skipped_steps": "trainer/test_step.py::test_bad_samples_are_those_of_the_last_bad_step",
    "save_ckpt_path": "trainer/test_runs.py::test_a_run_in_parts_is_the_unbroken_run",
    "load_ckpt_path": "trainer/test_runs.py::test_starting_from_another_run",
    "resuming_dataset": "trainer/test_runs.py::test_starting_from_another_run",
    "init_from": "trainer/test_first_start.py::test_what_a_run_began_with_may_be_gone",
    "max_failed_saves": "trainer/test_failing_saves.py::test_a_run_that_can_t_save_stops",
    "async_checkpoint": "trainer/test_failing_saves.py::test_training_continues_and_saves_when_it_can_again",
    "use_profiler": "trainer/test_profiling.py::test_a_run_says_where_its_time_goes",
}


def test_every_setting_has_its_test(project):
    assert OTHER_VALUES.keys() | SHOWN_BY.keys() == resolve.all_settings().keys()
    assert not OTHER_VALUES.keys() & SHOWN_BY.keys()
    for setting, test in SHOWN_BY.items():
        file, name = test.split("::")
        text = (project / "tests" / file).read_text()
        assert f"def {name}(" in text and setting in text, test


@pytest.fixture(scope="module")
def known():
    """{what two runs have in common: the effects of the run without more}, as far as they are known."""
    return {}


@pytest.fixture
def effects(train, metrics_of, tmp_path, change_loss, monkeypatch):
    """effects(settings) -> (the losses of a run with them, the files it leaves, all else that tells it from others)."""
    others = []

    def loss(state, true_loss):
        others.append(torch.are_deterministic_algorithms_enabled())
        return true_loss()

    change_loss(loss)
    monkeypatch.setattr(
        "mamba_fsdp.parallel.parallelize.compile_blocks", lambda blocks: others.append("compiled")
    )
    wandb = SimpleNamespace(log=lambda values, step: None, finish=lambda: None, resumed=False)
    wandb.setup = lambda: SimpleNamespace(settings=SimpleNamespace(mode="offline"))
    wandb.init = lambda project, name, **_: others.append((project, name)) or wandb
    monkeypatch.setitem(sys.modules, "wandb", wandb)

    def run_with(given):
        others.clear()
        folder = tmp_path / "run"
        shutil.rmtree(folder, ignore_errors=True)
        try:
            said = train(folder, **given)
        except UserError as error:
            return str(error), [], []
        entries = metrics_of(folder)
        losses = [
            [entry.get(name) for name in ("loss", "grad_norm", "val_loss")] for entry in entries
        ]
        files = {re.sub("tfevents.*", "tfevents", path.name) for path in folder.rglob("[!.]*")}
        lines = [line for line in said.splitlines() if not line.startswith("step")]
        return losses, files, [entries, lines, *others]

    return run_with


@pytest.mark.slow
@pytest.mark.parametrize("setting", OTHER_VALUES)
def test_a_setting_changes_something(effects, known, corpus, setting):
    """What a model is, reads and learns by changes the losses."""
    value, common = OTHER_VALUES[setting]
    if str(common) not in known:
        known[str(common)] = effects(common)
        assert effects(common) == known[str(common)], "equal runs differ, which proves nothing"
    without = known[str(common)]
    found = effects({**common, setting: str(value).format(corpus=corpus)})
    section, _ = resolve.all_settings()[setting]
    if section in ("model", "data", "optimizer", "lr_schedule"):
        assert found[0] != without[0]
    assert found != without
