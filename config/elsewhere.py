"""What users of other launchers type, and what it is here: one table, and how a word of theirs is looked up in it.

Sources: the settings, scripts and documents of the AWS FSDP-Mamba test case (aws), fms-fsdp and Bamba (fms), Composer
as mambaoutai was trained with it (composer), and a WikiText-103 recipe on transformers' Trainer (trainer).
docs/from-*.md are made of it by config/pages.py. Where the meaning is the same, their name works; where it is not, the
answer names what does it here.
"""

import os
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, NamedTuple

from config.fields import BOOLEANS, shown
from mamba_fsdp.errors import UserError

LAUNCHERS = {
    "aws": "the AWS FSDP-Mamba test case",
    "fms": "fms-fsdp and Bamba",
    "composer": "Composer (mambaoutai)",
    "trainer": "transformers' Trainer",
}
SECTIONS = (
    "scheduler",
    "fsdp",
    "trainer",
    "general",
    "wandb",
)  # of their YAML files, beside those that are ours too
NOTHING = ("", "none", "null", "~")
ANYTHING = "*"  # as a key: any other value; as a value: the one that was typed


class Foreign(NamedTuple):
    """One or more names that mean the same; which of our settings they are, and which of their values can be had."""

    launchers: str
    names: str
    ours: str = ""  # "" for none. Of several, all but the first give way to what else sets them
    values: Mapping[str, str | None] | Callable[[Any, Mapping[str, Any]], Any] = {
        ANYTHING: ANYTHING
    }
    """Theirs, in small letters, and ours; None where it changes nothing, "!words" where it can't be had. A function
    takes the value and all that was given with it, and may return {setting: value}; raises ValueError."""
    words: str = ""  # why it is not needed, or can't be had and what does it here

    def changes_nothing(self) -> bool:
        """Whatever its value."""
        return not self.ours and isinstance(self.values, Mapping) and ANYTHING in self.values


def same(launchers: str, names: str) -> list[Foreign]:
    return [Foreign(launchers, name, name) for name in names.split()]


def needless(launchers: str, names: str, words: str, only: str = ANYTHING) -> list[Foreign]:
    """What has no counterpart since none is needed; where it is so for some values `only`, others are refused."""
    return [Foreign(launchers, names, "", dict.fromkeys(only.split()), words)]


def missing(launchers: str, names: str, words: str, but: str = "none false") -> list[Foreign]:
    """What can't be had, and what to do instead; the values `but` ask for nothing."""
    return [Foreign(launchers, names, "", dict.fromkeys(but.split()), words)]


def becomes(
    launchers: str, names: str, ours: str, values: Any = None, words: str = ""
) -> list[Foreign]:
    return [Foreign(launchers, names, ours, values or {ANYTHING: ANYTHING}, words)]


def environment(launchers: str, names: str, words: str) -> list[Foreign]:
    """Variables of a script; no settings."""
    return [
        Foreign(
            launchers, names, "", {}, f"a variable in the environment of 1.train.sbatch: {words}"
        )
    ]


# ---------------------------------------------------------------- conversions


def composer_time(text: Any, _given: Mapping[str, Any]) -> str:
    """Composer's durations: 1006878720tok, or 100ba for steps."""
    if not str(text).endswith(("ba", "tok")):
        raise ValueError(
            "epochs and the like are no unit of it here; write steps (as in 100ba) or tokens (2Btok)"
        )
    return steps_or_tokens(text)


def steps_or_tokens(text: Any, _given: object = None) -> str:
    return str(text).removesuffix("ba")


def composer_paths(_text: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    """text_paths and code_paths, lists of {path, weight, order}, as the datasets of one folder."""
    kinds = [
        value
        for key, value in given.items()
        if key.rpartition(".")[2] in ("text_paths", "code_paths")
    ]
    entries = [entry for kind in kinds if isinstance(kind, list) for entry in kind]
    if not all(isinstance(entry, dict) and entry.get("path") for entry in entries) or not entries:
        raise ValueError("expected a list of `path: FILE`, each with its weight")
    if any(str(entry.get("order", 0)) != "0" for entry in entries):
        raise ValueError("an order is none here: the sources are mixed from start to end")
    paths = [entry["path"] for entry in entries]
    if len(paths) == 1:
        return {"dataset_path": paths[0]}
    folder = os.path.commonpath([os.path.dirname(path) for path in paths])
    weights = [entry["weight"] for entry in entries if entry.get("weight")]
    return {
        "dataset_path": folder,
        "datasets": [os.path.relpath(path, folder) for path in paths],
        **({"weights": weights} if weights else {}),
    }


def seconds(text: Any, _given: object = None) -> str:
    """Theirs of a timeout, as our minutes."""
    if not str(text).replace(".", "", 1).isdigit():
        raise ValueError("expected a number of seconds")
    return f"{float(text) / 60:g}"


STRATEGY = {
    "full_shard": "fsdp",
    "hybrid_shard": "hsdp",
    "no_shard": "ddp",
    ANYTHING: ANYTHING,
    "shard_grad_op": "!it keeps whole weights from the forward to the backward pass, which nothing here does: "
    "sharding_strategy=fsdp gathers them twice, ddp keeps everything whole",
}
FALL = (
    "!theirs rises linearly, then falls from the end of the warm-up to 0 or alpha_f; cosine and linear here fall "
    "from step 0 to min_learning_rate_ratio, and cosine rises quadratically, as in fms-fsdp: schedule=cosine, "
    "linear or wsd"
)

# ---------------------------------------------------------------- the table

TABLE: list[Foreign] = [
    row
    for rows in (
        # the model
        same("aws", "model_name"),
        becomes("fms", "model_variant", "model_name"),
        same("fms composer trainer", "vocab_size"),
        same("composer trainer", "d_model n_layer"),
        same("composer", "d_intermediate headdim tie_embeddings"),
        same("trainer", "d_state d_conv expand"),
        becomes("trainer", "dt_rank", "dt_rank", {"auto": "0", ANYTHING: ANYTHING}),
        becomes("trainer", "tie_word_embeddings", "tie_embeddings"),
        becomes("composer", "ssm_cfg_layer", "layers", {"mamba1": "mamba1", "mamba2": "mamba2"}),
        needless(
            "trainer",
            "use_fast_path fused_add_norm use_liger_kernel liger_kernel_config use_cache",
            "the best operators that can serve are taken (kernels)",
        ),
        needless(
            "trainer", "residual_in_fp32 rms_norm conv_bias", "these models always have it", "true"
        ),
        needless("trainer", "bias", "the projections of these models have none", "false"),
        needless(
            "trainer",
            "pad_token_id bos_token_id eos_token_id",
            "they come with the tokenizer of the data",
        ),
        needless(
            "trainer",
            "initializer_range",
            "0.02 is what the embedding has here, and nothing else can be had",
            "0.02",
        ),
        needless(
            "trainer",
            "train_from_scratch",
            "weights are random unless given: init_from=FOLDER starts from others",
            "true",
        ),
        missing(
            "fms",
            "tp_size model_arch model_path n_speculator_heads speculator_width speculator_tie_weights "
            "speculator_scale_input stage2_start_step stage2_prompt_length stage2_batch_size stage2_seq_length",
            "this program trains no speculators",
        ),
        same("composer", "position_weighting"),
        # the data
        same("aws", "dataset_path"),
        becomes("fms", "data_path", "dataset_path"),
        same("aws fms", "datasets weights seq_length"),
        same("fms", "use_dummy_dataset"),
        becomes("composer trainer", "seq_len max_seq_length block_size", "seq_length"),
        becomes(
            "composer", "text_paths code_paths", "dataset_path datasets weights", composer_paths
        ),
        needless(
            "composer",
            "code_percentage text_percentage n_total_tokens token_size",
            "the data itself says it",
        ),
        needless(
            "composer",
            "n_samples_to_skip",
            "a checkpoint knows its position in the data: resuming_dataset=true",
            "0",
        ),
        needless(
            "aws fms",
            "logical_shards",
            "the order of the samples is computed and the same on any number of ranks",
        ),
        becomes("fms", "tokenizer_path", "tokenizer"),
        same("fms", "eos_token bos_token strip_tokens col_name"),
        becomes("aws fms", "sep_token", "eos_token"),
        needless("fms", "file_type", "formats are recognised", "arrow hf_parquet auto"),
        missing(
            "fms",
            "bol_token eol_token",
            "a window is cut from one stream of documents and gets no tokens of its own",
            "none",
        ),
        missing(
            "trainer",
            "dataset_name dataset_config tokenizer_name train_parquet val_parquet cache_dir overwrite_cache "
            "preprocessing_num_workers",
            "data is made before: get_dataset.py DATASET OUT --config=CONFIG "
            "--tokenizer=NAME, then dataset_path=OUT",
        ),
        missing(
            "trainer",
            "train_sampling_strategy group_by_length length_column_name",
            "samples are windows of one length, in an order that seed gives",
            "none false random length",
        ),
        missing(
            "trainer",
            "label_smoothing_factor neftune_noise_alpha",
            "the loss is that of the tokens as they are",
            "none false 0.0",
        ),
        same("fms composer", "num_workers"),
        becomes("trainer", "dataloader_num_workers", "num_workers"),
        becomes(
            "composer trainer",
            "prefetch_factor dataloader_prefetch_factor",
            "prefetch",
            {"none": None, ANYTHING: ANYTHING},
            "counted in steps",
        ),
        # length and batch
        same("aws fms", "num_steps"),
        becomes("trainer", "max_steps", "num_steps", {"-1": None, ANYTHING: ANYTHING}),
        becomes("trainer", "num_train_epochs", "num_epochs"),
        becomes("composer", "max_duration", "num_steps", composer_time),
        same("aws fms", "batch_size"),
        same("composer", "global_batch_size batch_size"),
        becomes("composer", "data.global_batch_size", "global_batch_size"),
        becomes(
            "composer trainer",
            "micro_batch_size device_train_microbatch_size per_device_train_batch_size "
            "train_batch_size",
            "batch_size",
        ),
        same("trainer", "gradient_accumulation_steps"),
        needless(
            "trainer",
            "average_tokens_across_devices",
            "a step's loss is the mean over all of its tokens",
            "true",
        ),
        missing(
            "trainer",
            "auto_find_batch_size",
            "`python -m mamba_fsdp plan` says which batch_size fits",
        ),
        needless(
            "composer trainer",
            "eval_batch_size per_device_eval_batch_size",
            "validation takes batch_size at a time; its result does not depend on it",
        ),
        same("aws fms trainer", "seed"),
        needless("trainer", "data_seed", "seed orders the samples too"),
        # the optimiser
        same("aws fms trainer", "learning_rate"),
        same("trainer", "weight_decay adam_epsilon warmup_steps"),
        becomes("composer", "lr", "learning_rate"),
        same("composer", "beta1 beta2 weight_decay"),
        *(
            becomes("trainer", f"training.{name}", name)
            for name in ("learning_rate", "weight_decay", "adam_epsilon", "warmup_steps")
        ),
        becomes("trainer", "adam_beta1", "beta1"),
        becomes("trainer", "adam_beta2", "beta2"),
        same("aws fms", "grad_clip_thresh"),
        becomes("composer trainer", "clipping_threshold max_grad_norm", "grad_clip_thresh"),
        needless(
            "trainer",
            "optim",
            "AdamW is the only optimiser here",
            "adamw_torch adamw_torch_fused adamw_hf",
        ),
        becomes(
            "fms", "training_stage", "schedule", {"initial": "cosine", "annealing": "annealing"}
        ),
        becomes("composer", "scheduler.name", "schedule", {"wsd": "wsd", "cosine": FALL}),
        becomes(
            "trainer",
            "lr_scheduler_type",
            "schedule",
            {
                "constant": "constant",
                "constant_with_warmup": "constant",
                "linear": FALL,
                "cosine": FALL,
            },
        ),
        missing(
            "trainer",
            "optim_args optim_target_modules lr_scheduler_kwargs",
            "all that AdamW and the schedules can be told are settings: beta1, adam_epsilon, min_learning_rate_ratio",
        ),
        needless(
            "trainer", "warmup_ratio", "the warm-up is counted in steps: warmup_steps", "0 0.0"
        ),
        becomes("composer", "t_warmup", "warmup_steps", composer_time),
        becomes("composer", "t_decay", "decay_steps", composer_time),
        becomes(
            "composer",
            "t_max",
            "schedule_steps num_steps",
            composer_time,
            "num_steps alone makes the run longer or shorter than its schedule",
        ),
        becomes("composer", "alpha_f", "min_learning_rate_ratio"),
        # precision and sharding
        same("aws fms trainer", "mixed_precision"),
        becomes("trainer", "bf16", "mixed_precision", {"true": "bf16", "false": "fp32"}),
        becomes("trainer", "fp16", "mixed_precision", {"true": "fp16", "false": "fp32"}),
        becomes("aws fms composer", "sharding_strategy", "sharding_strategy", STRATEGY),
        needless(
            "composer",
            "backward_prefetch limit_all_gathers activation_checkpointing_reentrant",
            "it has one right value, which is always taken",
        ),
        needless(
            "composer",
            "process_group",
            "sharding_strategy=hsdp makes the groups that it needs",
            "none",
        ),
        needless("composer", "fsdp_layer_wrap", "each block is always gathered by itself", "true"),
        needless("composer", "verbose", "each start says what it does"),
        same(
            "aws fms",
            "fsdp_activation_checkpointing selective_checkpointing low_cpu_fsdp use_torch_compile",
        ),
        becomes(
            "composer trainer",
            "activation_checkpointing gradient_checkpointing",
            "fsdp_activation_checkpointing",
        ),
        becomes(
            "composer",
            "precision",
            "mixed_precision",
            {"amp_bf16": "bf16", "amp_fp16": "fp16", "fp32": "fp32"},
        ),
        becomes("composer trainer", "dist_timeout ddp_timeout", "timeout_minutes", seconds),
        becomes("trainer", "torch_compile", "use_torch_compile"),
        missing(
            "trainer",
            "torch_compile_backend torch_compile_mode",
            "use_torch_compile=true has PyTorch's usual ones",
            "none inductor default",
        ),
        missing(
            "trainer",
            "gradient_checkpointing_kwargs activation_checkpointing_kwargs",
            "blocks always recompute with use_reentrant=False",
        ),
        missing(
            "trainer",
            "use_cpu no_cuda",
            "`CUDA_VISIBLE_DEVICES=` before the command hides the GPUs",
        ),
        becomes("composer trainer", "deterministic_mode full_determinism", "deterministic"),
        needless(
            "trainer",
            "tf32 torch_empty_cache_steps dataloader_pin_memory dataloader_drop_last dataloader_in_order "
            "dataloader_persistent_workers dataloader_multiprocessing_context",
            "it is chosen for the machine",
        ),
        missing(
            "trainer",
            "fsdp fsdp_config deepspeed accelerator_config parallelism_config",
            "sharding_strategy=fsdp, hsdp or ddp says who holds what",
        ),
        needless(
            "trainer",
            "ddp_backend ddp_find_unused_parameters ddp_bucket_cap_mb ddp_broadcast_buffers "
            "ddp_static_graph remove_unused_columns label_names",
            "there is nothing to choose here",
        ),
        # checkpoints
        same("aws", "load_ckpt_path save_ckpt_path"),
        same("fms", "resuming_dataset"),
        becomes("fms", "ckpt_load_path", "load_ckpt_path"),
        becomes("fms", "ckpt_save_path", "save_ckpt_path"),
        becomes("composer trainer", "save_folder output_dir", "save_ckpt_path"),
        becomes(
            "composer",
            "load_path",
            "load_ckpt_path",
            {
                "none": None,
                ANYTHING: "!init_from=FILE takes a Composer checkpoint's weights, converted as it then says",
            },
        ),
        same("aws fms", "checkpoint_interval"),
        becomes("trainer", "save_steps", "checkpoint_interval"),
        becomes("composer", "save_interval cp_interval", "checkpoint_interval", composer_time),
        becomes(
            "composer trainer", "save_num_checkpoints_to_keep save_total_limit", "keep_checkpoints"
        ),
        needless(
            "composer trainer",
            "autoresume resume resume_from_checkpoint",
            "the same command always resumes from save_ckpt_path; another folder begins anew, load_ckpt_path=RUN "
            "starts from another run's weights",
            "true none",
        ),
        needless(
            "trainer",
            "save_strategy logging_strategy",
            "checkpoint_interval and report_interval count steps",
            "steps",
        ),
        missing(
            "trainer",
            "load_best_model_at_end",
            "a run ends with its last weights; keep_checkpoints keeps more",
        ),
        needless(
            "trainer", "metric_for_best_model greater_is_better", "a run ends with its last weights"
        ),
        missing(
            "trainer",
            "early_stopping_patience early_stopping_threshold",
            "a run has its length; a file STOP in its folder ends it earlier, with a checkpoint",
        ),
        needless(
            "composer trainer",
            "save_overwrite overwrite_output_dir save_filename save_latest_filename "
            "save_safetensors",
            "checkpoints have their names, and no other run overwrites them",
        ),
        missing(
            "composer trainer",
            "save_weights_only save_only_model",
            "checkpoints hold all that resuming needs; `python -m mamba_fsdp export` writes the weights alone",
        ),
        needless(
            "trainer",
            "save_on_each_node enable_jit_checkpoint restore_callback_states_from_checkpoint",
            "a checkpoint holds all that resuming needs, and is written where a run is stopped",
        ),
        missing(
            "trainer",
            "ignore_data_skip",
            "a run resumes its data too; load_ckpt_path=RUN in another folder takes the "
            "weights and optimiser, and begins the data anew",
        ),
        missing(
            "trainer",
            "push_to_hub hub_token hub_private_repo hub_model_id hub_strategy hub_always_push hub_revision",
            "`python -m mamba_fsdp export RUN FOLDER`, then `hf upload NAME FOLDER`",
            "none false every_save",
        ),
        missing(
            "composer",
            "load_weights_only",
            "init_from=FOLDER or load_ckpt_path=RUN starts from weights alone",
        ),
        # validation, reports, trackers, profiles
        becomes("composer", "eval_interval", "eval_interval", steps_or_tokens),
        becomes("trainer", "eval_steps", "eval_interval"),
        becomes(
            "trainer",
            "eval_strategy evaluation_strategy",
            "eval_interval",
            {
                "steps": None,
                "no": "0",
                "epoch": "!validation comes every eval_interval steps or tokens",
            },
        ),
        missing(
            "composer",
            "eval_subset_num_batches",
            "it counts batches of eval_batch_size a device; eval_batches counts "
            "global batches, and -1 lets validation cost a twentieth of the training",
            "-1",
        ),
        needless(
            "trainer",
            "fp16_full_eval bf16_full_eval",
            "validation computes in mixed_precision",
            "false",
        ),
        needless("trainer", "eval_on_start", "a run validates at its start"),
        missing(
            "trainer",
            "eval_delay",
            "validation comes every eval_interval, from the start",
            "none false",
        ),
        needless(
            "trainer",
            "prediction_loss_only eval_do_concat_batches eval_use_gather_object eval_accumulation_steps "
            "include_for_metrics include_inputs_for_metrics batch_eval_metrics",
            "validation is of the loss alone",
        ),
        needless(
            "trainer",
            "do_train do_eval do_predict",
            "a run trains and validates; `python -m mamba_fsdp evaluate` and `generate` do the rest",
        ),
        same("aws fms", "report_interval"),
        becomes("trainer", "logging_steps", "report_interval"),
        needless(
            "trainer",
            "logging_first_step",
            "the live line shows each step; the first entry is that of report_interval",
        ),
        needless(
            "trainer",
            "log_on_each_node log_level_replica logging_nan_inf_filter include_num_input_tokens_seen "
            "skip_memory_metrics",
            "rank 0 reports; metrics.jsonl holds loss, tokens and memory as they are",
        ),
        missing(
            "trainer",
            "debug",
            "NCCL_DEBUG and TORCH_DISTRIBUTED_DEBUG in the environment tell more",
        ),
        missing(
            "trainer",
            "project trackio_space_id trackio_bucket_id trackio_static_space_id",
            "tracker takes tensorboard and wandb (its project: wandb_project)",
            "none huggingface",
        ),
        needless("composer", "window_size", "rates are means over report_interval"),
        becomes("aws", "use_wandb", "tracker", {"true": "wandb", "false": "none"}),
        becomes("trainer", "use_wandb", "tracker", {"true": "wandb", "false": "none"}),
        becomes("trainer", "no_wandb", "tracker", {"true": "none", "false": None}),
        same("fms trainer", "tracker"),
        becomes(
            "trainer",
            "report_to",
            "tracker",
            {"all": "!name them: tracker=tensorboard,wandb", ANYTHING: ANYTHING},
        ),
        becomes(
            "aws fms composer",
            "wandb_project_name tracker_project_name project_name wandb.project",
            "wandb_project",
        ),
        same("trainer", "wandb_project"),
        becomes("composer trainer", "full_name run_name wandb.name", "wandb_name"),
        needless(
            "aws fms",
            "wandb_run_id tracker_run_id",
            "the run folder keeps an id of its own, under which it resumes",
        ),
        needless(
            "aws fms trainer",
            "wandb_dir tracker_dir logging_dir",
            "what trackers write lies in the run folder",
        ),
        missing(
            "trainer",
            "wandb.entity wandb.tags wandb.notes",
            "W&B takes it from the environment: WANDB_ENTITY, WANDB_TAGS, WANDB_NOTES",
        ),
        missing(
            "trainer",
            "wandb.log_model wandb.watch_model",
            "checkpoints and metrics stay in the run folder",
        ),
        needless(
            "composer", "auto_log_hparams", "config.yaml in the run folder holds all settings"
        ),
        missing(
            "composer",
            "callbacks loggers algorithms",
            "settings do it: tracker=wandb,tensorboard, use_profiler, sample_prompts=FILE writes texts at validations; "
            "metrics.jsonl holds throughput, memory and gradient norm",
        ),
        needless(
            "composer trainer",
            "progress_bar log_to_console console_log_interval disable_tqdm log_level",
            "the terminal shows a live line and one every report_interval",
        ),
        same("aws fms", "use_profiler"),
        needless(
            "fms", "profiler_rank0_only", "use_profiler writes a file for each rank", "true false"
        ),
        missing("aws", "use_nsight", "start it with PROFILE=nsys ./1.train.sbatch"),
        # around the program
        needless(
            "aws fms trainer",
            "nnodes node_rank nproc_per_node master_addr master_port rdzv_id rdzv_backend "
            "rdzv_endpoint num_processes num_gpus multi_gpu local_rank",
            "1.train.sbatch starts the ranks",
        ),
        needless(
            "aws",
            "container_image container_mount_home container_mounts",
            "1.train.sbatch starts the containers: IMAGE=FILE.sqsh, MOUNTS=/a,/b",
        ),
        environment(
            "aws",
            "GPUS_PER_NODE",
            "the same as PROCESSES_PER_NODE=N, without which every GPU is used",
        ),
        environment(
            "aws",
            "DATA_PATH FSX_MOUNT",
            "mounted as MOUNTS=/a,/b are; what settings name is mounted anyway",
        ),
        environment("trainer", "NUM_GPUS", "PROCESSES_PER_NODE=N, without which every GPU is used"),
    )
    for row in rows
]

# What each launcher takes where its user gives nothing, in its words: for a file that is brought here.
DEFAULTS: dict[str, dict[str, str]] = {
    "aws": {
        "seq_length": "4096",
        "batch_size": "2",
        "num_steps": "2000",
        "learning_rate": "3e-4",
        "grad_clip_thresh": "4.0",
        "report_interval": "200",
        "checkpoint_interval": "20000",
        "sharding_strategy": "fsdp",
        "keep_checkpoints": "1000",
    },
    "fms": {
        "model_variant": "7b",
        "seq_length": "4096",
        "batch_size": "2",
        "num_steps": "1000000",
        "learning_rate": "3e-4",
        "grad_clip_thresh": "1.0",
        "sharding_strategy": "hsdp",
        "report_interval": "100",
        "checkpoint_interval": "10000",
        "use_torch_compile": "true",
        "eos_token": "0",
        "keep_checkpoints": "1000",
    },
    "composer": {"model_name": "mambaoutai", "mixed_precision": "bf16", "tracker": "wandb"},
    "trainer": {"model_name": "mamba-130m", "max_seq_length": "2048", "sharding_strategy": "ddp"},
}
CONFIGS = {
    "mamba_130m": "wikitext103",
    "config_mambarabic": "mambaoutai",
}  # files of theirs: ours for the same run


# ---------------------------------------------------------------- looking up


class Meaning(NamedTuple):
    settings: dict[str, Any]  # ours, as text
    note: str = ""  # for the log; "" where theirs and ours are the same
    off: bool = False  # it only says what is not: fp16=false beside bf16=true


@lru_cache(maxsize=None)
def names() -> dict[str, Foreign]:
    """{name: its row}."""
    found: dict[str, Foreign] = {}
    for row in TABLE:
        for name in row.names.split():
            found.setdefault(name, row)
    return found


def synonyms() -> dict[str, list[str]]:
    """{our setting: the names that mean just the same}."""
    found: dict[str, list[str]] = {}
    for name, row in names().items():
        if row.values == {ANYTHING: ANYTHING} and row.ours not in ("", name) and "." not in name:
            found.setdefault(row.ours, []).append(name)
    return found


def find(
    key: str, own: str | None, sections: Mapping[str, Any], leaves: Mapping[str, Any]
) -> Foreign | None:
    """The row of the name `key`, with its section or without. own: our setting of that name, if there is one.
    sections, leaves: ours: a name of ours counts only below its own section, or one that is none of ours."""
    section, _, leaf = key.rpartition(".")
    if key in names() or own:
        return names().get(key) or names().get(str(own))
    if section in SECTIONS:
        return names().get(leaf) or (Foreign("", leaf, leaf) if leaf in leaves else None)
    return names().get(leaf) if section in sections and leaf not in leaves else None


def meaning(row: Foreign, key: str, text: Any, given: Mapping[str, Any]) -> Meaning:
    """What `key`=`text` is here. given: all that stands beside it. Raises UserError, with what does it here."""
    name = key.rpartition(".")[2]
    said = f"{name}={text if isinstance(text, str) else shown(text) if not isinstance(text, list) else '...'}"
    value, off = _value(row, text, given, said), _plain(text) in ("none", "false")
    if not row.ours or value in (None, {}):
        return Meaning({}, f"{said} changes nothing here{': ' if row.words else ''}{row.words}")
    settings = value if isinstance(value, dict) else dict.fromkeys(row.ours.split(), value)
    first, now = next(iter(settings.items()))
    if len(settings) == 1 and str(text).lower() == str(now).lower():
        note = (
            "" if name == first else f"{name} is {first} here{'; ' if row.words else ''}{row.words}"
        )
        return Meaning(settings, note, off)
    here = " ".join(f"{setting}={shown(value)}" for setting, value in settings.items())
    return Meaning(settings, f"{said} is {here}{'; ' if row.words else ' here'}{row.words}", off)


def _value(row: Foreign, text: Any, given: Mapping[str, Any], said: str) -> Any:
    """Ours for `text`, or None where it changes nothing. Raises UserError."""
    if not isinstance(row.values, Mapping):
        try:
            return row.values(text, given)
        except ValueError as error:
            raise UserError(f"{said}: {error}") from None
    plain = _plain(text, row.values)
    if plain not in row.values and ANYTHING not in row.values:
        ready = (
            f"expected {' or '.join(row.values)}"
            if row.ours
            else f"there is none here: {row.words}"
        )
        ready = ready if row.values else row.words
        raise UserError(f"{said}: {ready}")
    value = row.values.get(plain, row.values.get(ANYTHING))
    if value and value.startswith("!"):
        raise UserError(f"{said}: {value[1:]}")
    if value == ANYTHING and isinstance(text, Mapping):
        raise UserError(f"{said}: expected a value, not settings")
    return text if value == ANYTHING else value


def _plain(text: Any, known: Mapping[str, Any] | None = None) -> str:
    """`text` as keys of `values` are written: small, with true and false for yes, 0 and the like, unless `known`."""
    plain = str(text).lower()
    plain = "none" if plain in NOTHING else plain
    return (
        plain if known and plain in known or plain not in BOOLEANS else str(BOOLEANS[plain]).lower()
    )


def launcher_of(keys: Any) -> str | None:
    """The launcher that knows most of these names, and two at least more than are ours."""
    leaves = {key.rpartition(".")[2] for key in keys}
    counts = {
        launcher: sum(
            name in leaves
            for name, row in names().items()
            if launcher in row.launchers.split() and name != row.ours
        )
        for launcher in LAUNCHERS
    }
    best = max(counts, key=lambda launcher: counts[launcher])
    return best if counts[best] >= 2 else None
