"""What users of other launchers type is answered right: their published settings, each held against what is meant."""

import pytest

from config import other_launchers, resolve
from config.train_config import all_settings, setting_names
from mamba_fsdp import command_line
from mamba_fsdp.errors import UserError
from mamba_fsdp.model.spec import parameter_count

# word as typed there: the settings that it becomes; None: it works and changes nothing; a text: refused, and says this
PUBLISHED = {
    "aws": {
        "model_name=state-spaces/mamba-130m": {"model_name": "state-spaces/mamba-130m"},
        "model_name=state-spaces/mamba-130m-hf": {"model_name": "state-spaces/mamba-130m-hf"},
        "model_name=llama2_13b": {"model_name": "llama2_13b"},
        "load_ckpt_path=PATH": {"load_ckpt_path": "PATH"},
        "save_ckpt_path=PATH": {"save_ckpt_path": "PATH"},
        "dataset_path=PATH": {"dataset_path": "PATH"},
        "sharding_strategy=FSDP": {"sharding_strategy": "fsdp"},
        "fsdp_activation_checkpointing=True": {"fsdp_activation_checkpointing": True},
        "selective_checkpointing=1": {"selective_checkpointing": "1"},
        "batch_size=2": {"batch_size": 2},
        "learning_rate=3e-4": {"learning_rate": 3e-4},
        "grad_clip_thresh=4.0": {"grad_clip_thresh": 4.0},
        "num_steps=1200": {"num_steps": "1200"},
        "report_interval=200": {"report_interval": "200"},
        "checkpoint_interval=20000": {"checkpoint_interval": "20000"},
        "seq_length=4096": {"seq_length": 4096},
        "datasets=lang=en/dataset=commoncrawl,lang=de/dataset=wikipedia": {
            "datasets": ["lang=en/dataset=commoncrawl", "lang=de/dataset=wikipedia"]
        },
        "logical_shards=768": None,
        "mixed_precision=True": {"mixed_precision": "bf16"},
        "mixed_precision=False": {"mixed_precision": "fp32"},
        "low_cpu_fsdp=False": {"low_cpu_fsdp": False},
        "seed=2023": {"seed": 2023},
        "use_profiler=False": {"use_profiler": False},
        "use_nsight=False": None,
        "use_nsight=True": "PROFILE=nsys",
        "use_wandb=False": {"tracker": []},
        "use_wandb=True": {"tracker": ["wandb"]},
        "wandb_dir=PATH": None,
        "wandb_project_name=training": None,
        "wandb_run_id=aabbccdd": None,
        "use_torch_compile=False": {"use_torch_compile": False},
        "DATA_PATH=/fsx": "environment",
        "FSX_MOUNT=/fsx:/fsx": "environment",
        "GPUS_PER_NODE=8": "PROCESSES_PER_NODE=N",
        "sep_token=1": None,
    },
    "fms": {
        "model_variant=mamba_9.8b": {"model_name": "mamba_9.8b"},
        "model_variant=7b": {"model_name": "7b"},
        **{
            f"model_variant={name}": {"model_name": name}
            for name in (
                "13b",
                "34b",
                "70b",
                "llama2_1.4b",
                "llama3_194m_4k",
                "llama3_1.8b",
                "llama3_1.8b_4k",
                "llama3_3.2b",
                "llama3_8b_4k",
                "llama3_8b",
                "llama3_70b_4k",
            )
        },
        "tokenizer_path=PATH": None,
        "col_name=tokens": None,
        "bos_token=None": None,
        "eos_token=0": None,
        "strip_tokens=": None,
        "strip_tokens=1,2": None,
        "data_path=PATH": {"dataset_path": "PATH"},
        "vocab_size=128256": {"vocab_size": 128256},
        "ckpt_load_path=PATH": {"load_ckpt_path": "PATH"},
        "ckpt_save_path=PATH": {"save_ckpt_path": "PATH"},
        "use_dummy_dataset=True": {"use_dummy_dataset": True},
        "file_type=arrow": None,
        "file_type=hf_parquet": None,
        "file_type=auto": None,
        "bol_token=None": None,
        "bol_token=1": "gets no tokens of its own",
        "num_workers=0": {"num_workers": 0},
        "sharding_strategy=HSDP": {"sharding_strategy": "hsdp"},
        "training_stage=initial": {"schedule": "cosine"},
        "training_stage=annealing": {"schedule": "annealing"},
        "profiler_rank0_only=True": None,
        "tracker=wandb": {"tracker": ["wandb"]},
        "tracker=None": {"tracker": []},
        "tracker=": {"tracker": []},
        "tracker=aim": "must be one of tensorboard, wandb",
        "tracker_dir=PATH": None,
        "tracker_project_name=llama": None,
        "tracker_run_id=abc": None,
        "tp_size=8": "no speculators",
        "model_arch=embedllama": "no speculators",
        "n_speculator_heads=3": "no speculators",
        "stage2_start_step=15000": "no speculators",
    },
    "composer": {
        "d_model=2688": {"d_model": 2688},
        "n_layer=28": {"n_layer": 28},
        "fsdp_layer_wrap=true": None,
        "fsdp_layer_wrap=false": "always gathered by itself",
        "activation_checkpointing=true": {"fsdp_activation_checkpointing": True},
        "global_batch_size=896": {"global_batch_size": 896},
        "batch_size=7": {"batch_size": 7},
        "micro_batch_size=7": {"batch_size": 7},
        "eval_batch_size=8": None,
        "seq_len=4096": {"seq_length": 4096},
        "prefetch_factor=2": {"prefetch": 2},
        "n_total_tokens=400039358022": None,
        "lr=0.00045": {"learning_rate": 4.5e-4},
        "beta1=0.9": {"beta1": 0.9},
        "sharding_strategy=FULL_SHARD": {"sharding_strategy": "fsdp"},
        "sharding_strategy=SHARD_GRAD_OP": "sharding_strategy=fsdp gathers them twice",
        "process_group=null": None,
        "process_group=mod1": "sharding_strategy=hsdp",
        "backward_prefetch=BACKWARD_PRE": None,
        "limit_all_gathers=false": None,
        "verbose=true": None,
        "t_warmup=1006878720tok": {"warmup_steps": "1006878720tok"},
        "alpha_f=0.2": {"min_learning_rate_ratio": 0.2},
        "t_max=10068787200tok": {"schedule_steps": "10068787200tok", "num_steps": "10068787200tok"},
        "max_duration=1ep": "steps (as in 100ba) or tokens",
        "max_duration=100ba": {"num_steps": "100"},
        "cp_interval=1006878720tok": {"checkpoint_interval": "1006878720tok"},
        "eval_interval=100ba": {"eval_interval": "100"},
        "eval_subset_num_batches=16": "eval_batches",
        "save_folder=checkpoints": {"save_ckpt_path": "checkpoints"},
        "autoresume=true": None,
        "autoresume=false": "another folder begins anew",
        "clipping_threshold=1.0": {"grad_clip_thresh": 1.0},
        "position_weighting=true": {"position_weighting": True},
        "window_size=10": None,
        "precision=amp_bf16": {"mixed_precision": "bf16"},
        "precision=amp_fp8": "expected amp_bf16 or amp_fp16 or fp32",
        "dist_timeout=1200": {"timeout_minutes": 20.0},
        "dist_timeout=1h": "expected a number of seconds",
        "save_num_checkpoints_to_keep=2": {"keep_checkpoints": 2},
        "callbacks=x": "use_profiler",
        "save_overwrite=true": None,
        "load_weights_only=true": "init_from=FOLDER",
        "n_samples_to_skip=0": None,
        "n_samples_to_skip=5": "resuming_dataset=true",
    },
    "trainer": {
        "no_wandb=True": {"tracker": []},
        "resume=True": None,
        "output_dir=./x": {"save_ckpt_path": "./x"},
        "num_train_epochs=5": {"num_epochs": 5.0},
        "per_device_train_batch_size=4": {"batch_size": 4},
        "gradient_accumulation_steps=8": {"gradient_accumulation_steps": 8},
        "max_seq_length=2048": {"seq_length": 2048},
        "bf16=true": {"mixed_precision": "bf16"},
        "bf16=false": {"mixed_precision": "fp32"},
        "fp16=true": {"mixed_precision": "fp16"},
        "mixed_precision=no": {"mixed_precision": "fp32"},
        "gradient_checkpointing=true": {"fsdp_activation_checkpointing": True},
        "train_from_scratch=true": None,
        "train_from_scratch=false": "init_from=FOLDER",
        "tracker=wandb,tensorboard": {"tracker": ["wandb", "tensorboard"]},
        "report_to=none": {"tracker": []},
        "lr_scheduler_type=cosine": "schedule=cosine",
        "warmup_ratio=0.1": "warmup_steps",
        "save_total_limit=2": {"keep_checkpoints": 2},
        "report_to=all": "tracker=tensorboard,wandb",
        "report_to=tensorboard,wandb": {"tracker": ["tensorboard", "wandb"]},
        "save_only_model=true": "export",
        "fsdp=full_shard": "sharding_strategy=fsdp",
        "ddp_timeout=1800": {"timeout_minutes": 30.0},
        "tf32=true": None,
        "torch_compile=true": {"use_torch_compile": True},
        "full_determinism=true": {"deterministic": True},
        "max_steps=-1": None,
        "max_steps=50": {"num_steps": "50"},
        "eval_strategy=no": {"eval_interval": "0"},
    },
}


@pytest.mark.parametrize(
    "launcher, word", [(name, word) for name, words in PUBLISHED.items() for word in words]
)
def test_a_published_setting_is_answered_right(launcher, word):
    (name, _, value), meant = word.partition("="), PUBLISHED[launcher][word]
    if isinstance(meant, str):
        with pytest.raises(UserError) as caught:
            resolve.resolve_settings({name: value})
        assert meant in str(caught.value) and "did you mean" not in str(caught.value)
        return
    meant = meant or {}
    settings, explicit = resolve.resolve_settings({name: value})
    written = {
        key: value
        for section in resolve.as_dict(settings).values()
        for key, value in section.items()
    }
    assert {key: written[key] for key in explicit} == meant
    renamed = next(iter(meant), "") != name
    assert not renamed or any(note.startswith(name) for note in settings.notes), (
        "the log says what it became"
    )


@pytest.mark.slow
def test_every_argument_of_the_trainer_is_answered():
    """The value that it has where nothing is given is no mistake, but for None where ours is always something."""
    import dataclasses

    from transformers import TrainingArguments

    fields = {field.name: field.default for field in dataclasses.fields(TrainingArguments)}
    assert not fields.keys() - setting_names().keys() - other_launchers.entries().keys()
    refused = set()
    for name, value in fields.items():
        if value is not dataclasses.MISSING:
            try:
                resolve.resolve_settings({name: str(value)})
            except UserError:
                refused.add(name)
    assert refused == {
        "lr_scheduler_type",
        "activation_checkpointing",
        "gradient_checkpointing",
        "eval_steps",
        "save_total_limit",
    }


def test_each_entry_leads_to_settings_that_there_are():
    launchers = {*other_launchers.content()["launchers"], "earlier", "us"}
    for entry in other_launchers.entries().values():
        assert set(entry.settings) <= all_settings().keys(), entry
        assert set(entry.launchers) <= launchers and (entry.settings or entry.why), entry


EARLIER = [word for word, entry in other_launchers.entries().items() if entry.usual]


@pytest.mark.parametrize("name", EARLIER)
def test_a_setting_that_is_gone(name, tmp_path):
    """A user is told what to do instead; in the config.yaml of an older run it is passed over, and noted unless it had
    its default."""
    entry = other_launchers.entries()[name]
    file = tmp_path / "config.yaml"
    for given, config_file in (({name: "7"}, None), ({}, str(file))):
        file.write_text(f"training: {{{name}: 7}}\n")
        if entry.launchers == ["earlier"]:
            with pytest.raises(UserError) as caught:
                resolve.resolve_settings(given, config_file)
            assert f"{name}=7: no longer a setting; {entry.why}" in str(caught.value)
        else:
            notes = resolve.resolve_settings(given, config_file)[0].notes
            assert notes[0] == f"{name}=7 changes nothing here: {entry.why}"
    settings = resolve.as_yaml(resolve.resolve_settings({})[0])
    for value, noted in ((entry.usual[0].replace("none", "''"), False), ("7", True)):
        file.write_text(settings.replace("training:\n", f"training:\n  {name}: {value}\n"))
        notes = resolve.resolve_settings({}, str(file))[0].notes
        said = f"{name}=7 is no longer a setting and ignored; {entry.why}"
        assert notes == ([said] if noted else [])


def test_a_value_that_is_gone(tmp_path):
    with pytest.raises(UserError, match="tracker=prometheus: no longer there; metrics.jsonl"):
        resolve.resolve_settings({"tracker": "prometheus"})
    file = tmp_path / "config.yaml"
    text = resolve.as_yaml(resolve.resolve_settings({"tracker": "tensorboard"})[0])
    file.write_text(text.replace("tracker:\n", "tracker:\n  - prometheus\n"))
    settings, _ = resolve.resolve_settings({}, str(file))
    assert settings.report.tracker == ["tensorboard"]
    assert settings.notes[0].startswith("report.tracker=prometheus is ignored: no longer there")


@pytest.mark.parametrize(
    "name, said",
    [
        ("configs/mamba_130m.yaml", "that run is --config=wikitext103 here"),
        ("mine.yaml", "give a path or one of bamba-9b"),
    ],
)
def test_a_config_of_theirs_that_is_not_there_names_ours(name, said):
    with pytest.raises(UserError) as caught:
        resolve.resolve_settings({}, name)
    assert said in str(caught.value)


def test_a_flag_that_begins_with_no_is_itself():
    assert command_line.split(["--no_wandb", "--resume", "--tracker=x"])[1] == {
        "no_wandb": "True",
        "resume": "True",
        "tracker": "x",
    }


def test_what_only_says_what_is_not_gives_way():
    def resolved(**given):
        return resolve.resolve_settings(given)[0]

    assert resolved(bf16="true", fp16="false").training.mixed_precision == "bf16"
    assert resolved(fp16="true", bf16="false").training.mixed_precision == "fp16"
    for words in ({"bf16": "true", "fp16": "false"}, {"fp16": "false", "bf16": "true"}):
        assert resolved(**words).notes[:-1] == ["bf16=true is mixed_precision=bf16 here"], (
            "no word that gave way"
        )
    assert resolved(use_wandb="False", tracker="tensorboard").report.tracker == ["tensorboard"]
    assert resolved(t_max="100tok", num_steps="500tok").training.num_steps.count == 500
    for both in ({"bf16": "true", "fp16": "true"}, {"seq_len": "8", "seq_length": "16"}):
        with pytest.raises(UserError, match="given twice"):
            resolved(**both)
    assert resolved(seq_len="8", seq_length="8").data.seq_length == 8


def test_all_mistakes_are_told_at_once(tmp_path):
    file = tmp_path / "composer.yaml"
    file.write_text(
        "data: {seq_len: 64, n_samples_to_skip: 5}\nscheduler: {name: cosine, t_wramup: 3ba}\n"
        "fsdp: {sharding_strategy: SHARD_GRAD_OP, verbose: true}\ntrainer: {eval_subset_num_batches: 16}\n"
    )
    with pytest.raises(UserError) as caught:
        resolve.resolve_settings({"batch_size": "two", "sharding_strategy": "fsdp"}, str(file))
    said = str(caught.value)
    assert "6 mistakes:" in said and "docs/from-composer.md" in said
    assert all(
        word in said
        for word in (
            "batch_size=two",
            "n_samples_to_skip=5",
            "name=cosine",
            "t_wramup",
            "SHARD_GRAD_OP",
            "eval_subset_num_batches",
        )
    )


def test_a_section_of_theirs_is_only_a_prefix(tmp_path):
    file = tmp_path / "theirs.yaml"
    file.write_text(
        "data: {global_batch_size: 16, micro_batch_size: 8}\noptimizer: {lr: 1e-3}\n"
        "fsdp: {limit_all_gathers: false, activation_checkpointing: true}\n"
        "model: {activation_checkpointing: true}\nwandb: {project: mine}\ngeneral: {full_name: one}\n"
        "tracker: wandb\n"
    )
    settings = resolve.resolve_settings({}, str(file))[0]
    assert (settings.training.global_batch_size, settings.optimizer.learning_rate) == (16, 1e-3)
    assert (settings.report.wandb_project, settings.report.wandb_name) == ("mine", "one")
    assert settings.notes[-1].endswith("docs/from-composer.md"), (
        "defaults that differ are not silent"
    )


@pytest.mark.parametrize(
    "name, length",
    [
        ("demo", 256),
        ("mamba-130m", 2048),
        ("state-spaces/mamba-130m", 4096),
        ("mamba2-1.3b", 2048),
        ("mamba_9.8b", 4096),
        ("llama3_8b_4k", 4096),
        ("mambaoutai", 4096),
    ],
)
def test_seq_length_comes_with_the_preset(name, length):
    assert resolve.resolve_settings({"model_name": name})[0].data.seq_length == length


@pytest.mark.parametrize(
    "name, count",
    [
        ("llama2_1.4b", 1.3e9),
        ("llama3_194m_4k", 0.194e9),
        ("llama3_1.8b", 1.9e9),
        ("llama3_3.2b_4k", 3.2e9),
    ],
)
def test_the_small_models_of_fms_have_their_size(name, count):
    model = resolve.resolve_settings({"model_name": name})[0].model
    assert abs(parameter_count(model) / count - 1) < 0.05
