"""Tests that every setting has an effect: with another value, a run has other losses, files or printed lines."""

import re
import shutil

import pytest

from mamba_fsdp.errors import UserError
from mamba_fsdp.settings import resolve
from tests.support.checkpoints import metrics_of

# Common settings of runs, with which the settings in OTHER_VALUES have an effect. As many as possible share one short run.
USUAL = {"num_steps": 3, "eval_interval": 0, "checkpoint_interval": 9, "publish": False}
HYBRID = {
    **USUAL,
    "num_steps": 1,
    "n_layer": 4,
    "layers": "mamba1,mamba2,mamba3/gdn,attention+mlp",
    "headdim": 8,
    "n_head": 4,
    "n_kv_head": 2,
}
VALIDATED = {**USUAL, "num_steps": 2, "eval_interval": 1}
SAVED = {**USUAL, "num_steps": 5, "checkpoint_interval": 1, "keep_checkpoints": 2}
# [(common settings, {setting: another value})]. A run with the common settings is compared with a run that also has the
# other value.
OTHER_VALUES = [
    (USUAL | {"n_layer": 1, "global_batch_size": 2}, {"model_name": "mamba-130m"}),
    (
        HYBRID,
        {
            "d_model": 32,
            "n_layer": 3,
            "layers": "mamba1,mamba2,mamba3/gdn+mlp,attention",
            "vocab_size": 80,
            "pad_vocab_size_multiple": 128,
            "tie_embeddings": False,
            "norm_eps": 0.1,
            "d_state": 8,
            "d_conv": 2,
            "expand": 1,
            "d_ssm": 24,
            "dt_rank": 3,
            "bcdt_norm_eps": 1e-06,
            "headdim": 16,
            "ngroups": 2,
            "chunk_size": 16,
            "ssm_norm": "none",
            "decay_activation": "softplus",
            "attention_gate": True,
            "qk_norm": "head",
            "norm_position": "after_attention",
            "allow_neg_eigval": True,
            "gdn_norm_eps": 1.0,
            "n_head": 2,
            "n_kv_head": 4,
            "head_dim": 16,
            "rotary_dim": 0,
            "rope_theta": 100,
            "rope_scaling": "linear,factor=2",
            "d_intermediate": 24,
            "mlp_activation": "relu2",
            "multipliers": "embedding=3,ssm_out=0.5",
        },
    ),
    (
        USUAL,
        {
            "use_dummy_dataset": True,
            "dataset_path": "{corpus}/other",
            "datasets": "other",
            "seq_length": 16,
            "reset_at_documents": True,
            "position_weighting": True,
            "recipe": "published",
            "optimizer": "adamw",
            "muon_momentum": 0.5,
            "muon_coefficients": "jordan",
            "learning_rate": 0.02,
            "weight_decay": 0.5,
            "beta1": 0.5,
            "beta2": 0.5,
            "adam_epsilon": 0.1,
            "grad_clip_thresh": 0.01,
            "schedule": "linear",
            "warmup_steps": 3,
            "warmup_ratio": 0.9,
            "schedule_steps": 9,
            "min_learning_rate_ratio": 0.5,
            "num_epochs": 0.01,
            "num_steps": 2,
            "gradient_accumulation_steps": 2,
            "batch_size": 1,
            "global_batch_size": 4,
            "seed": 1,
            "mixed_precision": "bf16",
            "kernels": "auto",
            "publish": True,
            "sharding_strategy": "fsdp",
            "report_interval": 3,
            "tracker": "tensorboard",
        },
    ),
    (USUAL | {"datasets": "train,other"}, {"weights": "1,5"}),
    (
        VALIDATED,
        {
            "validation_path": "none",
            "eval_interval": 2,
            "eval_batches": 1,
        },
    ),
    (USUAL | {"datasets": "train,foreign"}, {"allow_other_tokenizer": True}),
    (USUAL | {"position_weighting": True}, {"position_window": 2}),
    (USUAL | {"schedule": "polynomial"}, {"polynomial_power": 2.0}),
    (USUAL | {"schedule": "cosine_with_restarts"}, {"restart_cycles": 2}),
    (USUAL | {"schedule": "wsd"}, {"decay_steps": 3}),
    (
        SAVED,
        {
            "checkpoint_interval": 3,
            "keep_checkpoints": 1,
            "keep_every": 2,
        },
    ),
]
CASES = [(name, value, common) for common, values in OTHER_VALUES for name, value in values.items()]
# {setting whose effect a short run of one process can't show: the test that shows it}
SHOWN_BY = {
    "num_workers": "data/test_loader.py::test_threads_read_the_configured_number_of_steps_ahead",
    "prefetch": "data/test_loader.py::test_threads_read_the_configured_number_of_steps_ahead",
    "fsdp_activation_checkpointing": "trainer/test_simulate.py::test_the_memory_of_a_device_equals_the_estimate",
    "selective_checkpointing": "trainer/test_simulate.py::test_the_memory_of_a_device_equals_the_estimate",
    "accumulate_unsharded": "trainer/test_simulate.py::test_gradients_are_reduced_for_each_micro_batch_or_once",
    "context_parallel": "trainer/test_ranks.py::test_any_ranks_and_strategies_in_turn_give_the_losses_of_one_process",
    "timeout_minutes": "trainer/test_ranks.py::test_a_rank_that_waits_forever_prints_its_stack_and_exits",
    "eval_prompts": "trainer/test_samples.py::test_samples_equal_the_output_of_generate_and_do_not_change_the_run",
    "dry_run": "trainer/test_runs.py::test_a_dry_run_describes_the_training_and_writes_nothing",
    "max_skipped_steps": "trainer/test_step.py::test_bad_samples_are_those_of_the_last_bad_step",
    "save_ckpt_path": "trainer/test_runs.py::test_an_interrupted_run_equals_an_uninterrupted_one",
    "load_ckpt_path": "trainer/test_runs.py::test_starting_from_another_run",
    "resuming_dataset": "trainer/test_runs.py::test_starting_from_another_run",
    "init_from": "trainer/test_starting_point.py::test_the_origin_of_a_run_can_be_removed",
    "max_failed_saves": "trainer/test_failing_saves.py::test_a_run_that_can_t_save_stops",
    "async_checkpoint": "trainer/test_failing_saves.py::test_a_run_that_can_t_save_stops",
    "wandb_project": "reporting/test_trackers.py::test_names_are_those_of_the_settings_then_of_the_environment",
    "wandb_name": "reporting/test_trackers.py::test_names_are_those_of_the_settings_then_of_the_environment",
    "deterministic": "trainer/test_kernel_selection.py::test_kernels_are_selected_again_if_the_settings_change",
    "use_torch_compile": "parallel/test_strategies.py::test_every_strategy_trains_as_one_process_does",
    "use_profiler": "trainer/test_profiling.py::test_a_run_prints_a_profile",
}


def test_every_setting_has_its_test(project):
    names = [*SHOWN_BY, *(setting for setting, _, _ in CASES)]
    assert sorted(names) == sorted(resolve.all_settings())
    for setting, test in SHOWN_BY.items():
        file, name = test.split("::")
        text = (project / "tests" / file).read_text()
        assert f"def {name}(" in text and setting in text, test


@pytest.fixture(scope="module")
def known():
    """Returns a dict {common settings: effects of a run with them} that the tests fill, so that each of these runs is
    made once."""
    return {}


@pytest.fixture
def effects(train, tmp_path):
    """Returns a function effects(settings), which trains and returns (losses, names of files, metrics and printed
    lines). If the training ends with a user error, it returns (the error, [], [])."""

    def run_with(given):
        folder = tmp_path / "run"
        shutil.rmtree(folder, ignore_errors=True)
        try:
            printed = train(folder, **given)
        except UserError as error:
            return str(error), [], []
        entries = metrics_of(folder)
        losses = [
            [entry.get(name) for name in ("loss", "grad_norm", "val_loss")] for entry in entries
        ]
        files = {re.sub("tfevents.*", "tfevents", path.name) for path in folder.rglob("[!.]*")}
        lines = [line for line in printed.splitlines() if not line.startswith("step")]
        return losses, files, [entries, lines]

    return run_with


@pytest.mark.slow
@pytest.mark.parametrize("setting, value, common", CASES, ids=[case[0] for case in CASES])
def test_a_setting_changes_something(effects, known, corpus, setting, value, common):
    """Another value of a setting changes the effects of a run. Another value of a setting of the model, the data, the
    optimizer or the schedule changes the losses."""
    if str(common) not in known:
        known[str(common)] = effects(common)
    without = known[str(common)]
    found = effects({**common, setting: str(value).format(corpus=corpus)})
    section, _ = resolve.all_settings()[setting]
    if section in ("model", "data", "optimizer", "lr_schedule"):
        assert found[0] != without[0]
    assert found != without
