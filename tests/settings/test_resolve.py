"""Tests mamba_fsdp.settings.resolve: settings have the values that the user gave, and impossible settings are refused
with the reason."""

import dataclasses
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mamba_fsdp import command_line
from mamba_fsdp.errors import UserError
from mamba_fsdp.fields import default, describe_type, format_value
from mamba_fsdp.settings import resolve as module
from mamba_fsdp.settings.dataset_config import DatasetConfig
from mamba_fsdp.settings.train_config import SECTIONS, Duration, TrainConfig, all_settings
from tests.support.checkpoints import commit_empty


def resolve(config_file=None, **given_words):
    return module.resolve_settings(given_words, config_file)


def refused(config_file=None, **given_words):
    with pytest.raises(UserError) as caught:
        resolve(config_file, **given_words)
    return str(caught.value)


def parse_settings(text):
    """Returns {name: value} of a text "name=value name=value"."""
    return dict(word.split("=", 1) for word in text.split())


def test_a_default_or_bound_changes_only_on_purpose(golden):
    """The defaults, types and bounds of all settings equal the recorded ones in defaults.txt, because users rely on
    them."""
    described = [
        f"{leaf.name}={format_value(default(leaf))} ({describe_type(leaf)})"
        for section in (*SECTIONS.values(), DatasetConfig)
        for leaf in dataclasses.fields(section)
    ]
    golden.check_text("defaults.txt", "".join(f"{line}\n" for line in described))


def test_resolved_settings_never_change():
    settings = resolve(d_model="64")
    others = settings.with_values(d_model=32, learning_rate=1.0)
    assert (others.model.d_model, others.optimizer.learning_rate) == (32, 1.0)
    assert settings.model.d_model == 64 and others.explicit == {"d_model"}
    for kind in (TrainConfig, *SECTIONS.values()):
        assert kind.__dataclass_params__.frozen


def test_leaf_section_and_synonym_name_the_same_setting(tmp_path):
    file = tmp_path / "a.yaml"
    # "optimizer" is the name of a section and of a setting in it.
    file.write_text("optimizer: muon\nlr_schedule:\n")
    assert resolve(str(file)) == resolve(optimizer="muon")
    for content in ("optimizer:\n  learning_rate: 3e-5\n", "learning_rate: 3e-5\n"):
        file.write_text(content)
        assert resolve(str(file)).optimizer.learning_rate == 3e-5
    for name in ("learning_rate", "optimizer.learning_rate", "lr"):
        assert resolve(**{name: "3e-5"}).optimizer.learning_rate == 3e-5
    assert resolve(output_dir="x").checkpoint.save_ckpt_path == "x"


def test_the_command_line_overrides_the_file_the_preset_and_the_defaults(tmp_path):
    file = tmp_path / "a.yaml"
    file.write_text("model_name: mamba-130m\nn_layer: 3\nd_state: 8\n")
    model = resolve(str(file), d_state="4").model
    assert (model.d_state, model.n_layer, model.d_model, model.expand) == (4, 3, 768, 2)


@pytest.mark.parametrize("text", ["0123", "1e3", "true", "None", "[a]", "a=b"])
def test_a_text_that_looks_like_a_number_stays_text(text, tmp_path):
    file = tmp_path / "a.yaml"
    file.write_text(f"save_ckpt_path: '{text}'\n")
    assert resolve(str(file)).checkpoint.save_ckpt_path == text
    _, given = command_line.split_arguments([f"--save_ckpt_path={text}"])
    assert resolve(**given).checkpoint.save_ckpt_path == text


MISTAKES = {
    "learing_rate=1": "did you mean learning_rate",
    "model.learning_rate=1": "did you mean learning_rate",
    "confg=demo": "did you mean config?",
    "tie_embeddings=maybe": "expected true or false",
    "save_ckpt_path=": "save_ckpt_path=: the value must not be empty",
    "batch_size=two": "batch_size=two: expected a whole number",
    "batch_size=0": "must be at least 1",
    "batch_size=1e15": "must be at most 16777216",
    "num_steps=9e18": "must be at most 10000000000",
    "num_steps=9e18tok": "must be at most 100000000000000",
    f"layers={'9' * 5000}*mamba1": "can't read",
    "learning_rate=nan": "finite",
    "min_learning_rate_ratio=0.5 schedule=constant": "decays to a floor",
    "min_learning_rate_ratio=0.5 schedule=wsd decay_steps=0": "decays to a floor",
    "schedule=cosin": "one of cosine, linear, wsd",
    "num_steps=ten": "num_steps=ten: expected a whole number of steps, as in 2000 or 10k, or of tokens, as in 1000tok",
    "seq_length=8 data.seq_length=9": "given twice",
    "warmup_ratio=0.1 warmup_steps=5": "excludes warmup_steps=5",
    "dataset_path=a\0b": "contains a NUL character",
    "weights=1,2 datasets=a": "one weight for each",
    "weights=0,0 datasets=a,b": "positive and finite",
    "weights=1,-1 datasets=a,b": "negative",
    "weights=1e308,1.5e308 datasets=a,b": "positive and finite",
    "global_batch_size=9 batch_size=2": "not a multiple",
    "resuming_dataset=true": "needs load_ckpt_path",
    "resuming_dataset=true load_ckpt_path=a.pth": "needs load_ckpt_path",
    "selective_checkpointing=2 fsdp_activation_checkpointing=true": "at least 0 and at most 1",
    "selective_checkpointing=1e-999999999 fsdp_activation_checkpointing=true": "at least 0 and at",
    "selective_checkpointing=1/0 fsdp_activation_checkpointing=true": "at least 0 and at most 1",
    "layers=mamba2 headdim=48": "does not divide",
    "layers=mamba1,gdn context_parallel=2": "share sequences between ranks; leave it at 1",
}


@pytest.mark.parametrize("given", MISTAKES)
def test_mistakes_are_refused_with_the_reason(given):
    assert MISTAKES[given] in refused(**parse_settings(given))


# {setting: (settings with which it has no effect, settings with which it has an effect)}, for each possible condition.
INEFFECTIVE = {
    "d_state=8": ("layers=attention", ""),
    "d_conv=3": ("layers=attention", ""),
    "dt_rank=3": ("layers=mamba2", ""),
    "ssm_norm=none": ("", "layers=mamba2"),
    "headdim=32": ("", "layers=mamba2"),
    "chunk_size=64": ("", "layers=mamba1,mamba2"),
    "decay_activation=softplus": ("layers=mamba2", "layers=mamba3"),
    "allow_neg_eigval=true": ("", "layers=gdn"),
    "n_kv_head=2": ("layers=mamba2", "layers=attention"),
    "rope_theta=500.0": ("layers=attention rotary_dim=0", "layers=attention"),
    "d_intermediate=64": ("", "layers=mamba1+mlp"),
    "validation_path=data/x": ("eval_interval=0", ""),
    "eval_interval=50": ("validation_path=none", ""),
    "eval_batches=4": ("validation_path=none eval_interval=0", ""),
    "position_window=5.0": ("", "position_weighting=true"),
    "prefetch=5": ("num_workers=0", ""),
    "muon_momentum=0.8": ("optimizer=adamw", ""),
    "muon_coefficients=jordan": ("optimizer=adamw", ""),
    "schedule_steps=5": ("schedule=inverse_sqrt", ""),
    "decay_steps=5": ("", "schedule=wsd_sqrt"),
    "polynomial_power=2.0": ("", "schedule=polynomial"),
    "restart_cycles=2": ("schedule=polynomial", "schedule=cosine_with_restarts"),
    "min_learning_rate_ratio=0.2": ("schedule=annealing", "schedule=wsd"),
    "selective_checkpointing=1/3": ("", "fsdp_activation_checkpointing=true"),
    "wandb_project=mine": ("tracker=tensorboard", "tracker=wandb"),
    "accumulate_unsharded=true": ("sharding_strategy=ddp", "sharding_strategy=fsdp"),
}


def test_the_table_has_a_setting_of_each_need():
    needs = {name: leaf.metadata["needs"] for name, (_, leaf) in all_settings().items()}
    tried = {needs[given.partition("=")[0]].description for given in INEFFECTIVE}
    assert tried == {need.description for need in needs.values() if need}


@pytest.mark.parametrize("given", INEFFECTIVE)
def test_a_setting_without_effect_is_refused(given, tmp_path):
    """A setting that has no effect because of other settings is an error. If it is a setting of the model, it is only
    reported, because one command line can be used for several models."""
    without_effect, with_effect = map(parse_settings, INEFFECTIVE[given])
    name = given.partition("=")[0]
    usual = resolve()
    resolve(**with_effect, **parse_settings(given))
    resolve(**without_effect, **{name: module.format_value(usual.value(name))})

    def report_on(*arguments, **given_words):
        if hasattr(usual.model, name):
            return "".join(resolve(*arguments, **given_words).notes)
        return refused(*arguments, **given_words)

    assert f"{given} has no effect without " in report_on(**without_effect, **parse_settings(given))
    file = tmp_path / "own.yaml"
    lines = [
        f"{key}: {value}\n" for key, value in {**without_effect, **parse_settings(given)}.items()
    ]
    file.write_text("".join(lines))
    assert re.search(f"{name}=.* has no effect without ", report_on(str(file)))


FITTING = {
    "layers=attention n_head=2": "n_kv_head=2 instead of 8",
    "layers=attention d_model=100": "n_head=4 instead of 8",
    "model_name=mamba_9.8b head_dim=32": "rotary_dim=-1 instead of 64",
    "layers=mamba2 d_model=48": "headdim=32 instead of 64",
    "layers=mamba3 ngroups=8": "headdim=32 instead of 64",
    "model_name=mamba-codestral-7b d_ssm=100": "ngroups=4 instead of 8",
    "model_name=granite-4.0-h-micro n_layer=3": "multipliers=embedding=12,residual=0.22,logits_divisor=8 ",
    "global_batch_size=4": "batch_size=4 instead of 8",
    "model_name=mamba-130m batch_size=24": "global_batch_size=264 instead of 256",
}


@pytest.mark.parametrize("given", FITTING)
def test_settings_that_were_not_given_are_adjusted_to_given_ones(given):
    """If a given setting does not fit the default of another setting, or its value in the preset, the latter is
    adjusted. A single setting is therefore never refused because of a setting that the user did not give."""
    assert FITTING[given] in " ".join(resolve(**parse_settings(given)).notes)
    assert not resolve(layers="attention", head_dim="25").notes


def test_a_length_in_thousands_is_pointed_out():
    """A sequence length in thousands, such as 2k, is reported, because lengths are usually powers of two and k means
    1,000."""
    settings = resolve(seq_length="2k")
    assert settings.data.seq_length == 2000
    assert settings.notes == ("seq_length=2k is 2,000; is 2048 meant? Write it in full",)
    assert not resolve(seq_length="2000").notes


def test_a_setting_in_a_file_that_the_command_line_makes_ineffective_is_dropped(tmp_path):
    """If the command line makes a setting of the file ineffective, the setting gets its default. The resolved
    settings can therefore be read again."""
    changed = resolve("mambaoutai", schedule="constant", eval_interval="0", model_name="llama2_7b")
    usual = TrainConfig()
    assert changed.lr_schedule.decay_steps == usual.lr_schedule.decay_steps
    assert changed.training.eval_batches == usual.training.eval_batches
    file = tmp_path / "config.yaml"
    file.write_text(module.as_yaml(changed))
    assert resolve(str(file)) == changed
    message = refused("mambaoutai", eval_interval="0", eval_batches="2")
    assert "eval_batches=2 has no effect" in message


def test_an_ineffective_setting_in_the_file_of_a_run_is_ignored(tmp_path):
    file = tmp_path / "config.yaml"
    settings = resolve(eval_interval="0")
    file.write_text(module.as_yaml(settings).replace("eval_batches: -1", "eval_batches: 0"))
    assert resolve(str(file)) == settings


def test_resolved_settings_survive_their_own_yaml(tmp_path):
    file = tmp_path / "resolved.yaml"
    for text in (
        "datasets=a,b weights=1,3 num_steps=5tok layers=2*mamba1 mixed_precision=fp16",
        "model_name=mamba_9.8b layers=mamba2",
    ):
        before = resolve(**parse_settings(text))
        file.write_text(module.as_yaml(before))
        assert resolve(str(file)) == before


WRONG_FILES = {
    "a: [": "can't be read as YAML",
    "sed: 3\n": "did you mean seed",
    "training: 3\n": "is a section",
    "optimizer: 3\n": "must be one of adamw, muon",
    "seed: 1\ntraining: {seed: 2}\n": "given twice",
    "seed: 1\nd_model: 8\nseed: 2\n": "seed is given twice",
    "version: 2\nseed: 1\n": "settings of version 2, but this version of the program reads version 1; use",
}


def test_a_wrong_file_is_refused_by_name(tmp_path):
    file = tmp_path / "wrong.yaml"
    for content, message in WRONG_FILES.items():
        file.write_text(content)
        error = refused(str(file))
        assert message in error and "wrong.yaml" in error
    assert "there is no file nowhere.yaml" in refused("nowhere.yaml")


UNCLEAR = "-1tok -2tok 5tokens tok 5TOK 1_tok _1 1__0 1e-3 k 2kk 1.2345k 1.5 0x10 nan inf 1e400 9223372036854775808 1e19tok ٣"


@pytest.mark.parametrize("text", [*UNCLEAR.split(), "5 tok", "2 k", ""])
def test_an_ambiguous_duration_is_refused(text):
    for name in ("num_steps", "warmup_steps", "eval_interval"):
        assert f"{name}={text}: expected " in refused(**{name: text})


DURATIONS = {
    "2_000": 2000,
    "2e3": 2000,
    "-1": -1,
    "10k": 10_000,
    "1.5e9tok": 15 * 10**8,
    "2Btok": 2 * 10**9,
    "1.5Mtok": 1_500_000,
    "0.5ktok": 500,
    "0.4Ttok": 4 * 10**11,
    "3gtok": 3 * 10**9,
    "0tok": 0,
    "9223372036854775807tok": 2**63 - 1,
}


def test_a_duration_is_read_exactly():
    for text, count in DURATIONS.items():
        unit = "tok" if text.endswith("tok") else "steps"
        assert Duration.parse(text) == Duration(count, unit)
    assert resolve(batch_size="10k").training.batch_size == 10_000


@given(st.integers(0, 10**13), st.sampled_from(["steps", "tok"]), st.integers(1, 10**7))
def test_a_duration_reads_what_it_writes_and_rounds_up(count, unit, tokens_per_step):
    duration = Duration.parse(str(Duration(count, unit)))
    assert duration == Duration(count, unit)
    steps = duration.steps(tokens_per_step)
    if unit == "steps":
        assert steps == count
    else:
        assert (steps - 1) * tokens_per_step < count <= steps * tokens_per_step


@pytest.fixture
def first_run(tmp_path, monkeypatch):
    """Creates a run with d_model=64 on data/a and a checkpoint, in runs/train of the current folder. Returns this
    folder."""
    monkeypatch.chdir(tmp_path)
    commit_empty(tmp_path / "runs/train", 1)
    settings = resolve(dataset_path="data/a", d_model="64")
    (tmp_path / "runs/train/config.yaml").write_text(module.as_yaml(settings))
    return tmp_path


OTHERS = {
    "dataset_path=data/b d_model=64": "dataset_path=data/b (there data/a)",
    "d_model=64 use_dummy_dataset=1": "dataset_path=data/builtin (there data/a)",
    "dataset_path=data/a": "d_model=128 (there 64)",
}
SAME = [
    "dataset_path=data/a d_model=64 num_steps=5",
    "dataset_path=data/a d_model=64 datasets=../a",
    "dataset_path=data/a init_from=x",
    "dataset_path=b save_ckpt_path=runs/train",
]


def test_another_experiment_in_the_same_folder_is_refused(first_run):
    """Settings with other data or another model than the run in runs/train are refused, because the folder is the
    default and was not given. If save_ckpt_path is given, they are accepted here."""
    for text in SAME:
        module.check_run_folder(resolve(**parse_settings(text)))
    for text, difference in OTHERS.items():
        with pytest.raises(UserError) as caught:
            module.check_run_folder(resolve(**parse_settings(text)))
        assert f"runs/train contains another run: {difference}; name a folder" in str(caught.value)


def test_the_run_folder_of_a_file_is_not_used_for_other_data(first_run):
    own = first_run / "own.yaml"
    own.write_text("dataset_path: data/a\nsave_ckpt_path: runs/train\nd_model: 64\n")
    module.check_run_folder(resolve(str(own), n_layer="3"))
    with pytest.raises(UserError, match="contains another run: dataset_path=data/b"):
        module.check_run_folder(resolve(str(own), dataset_path="data/b"))


def test_a_resumed_run_reports_changed_settings(first_run):
    """changed_settings lists the settings that differ from the last start. It shortens long values, and leaves out
    settings that only affect the first start."""
    given = {"dataset_path": "data/a", "d_model": "64"}
    assert module.changed_settings(resolve(**given, load_ckpt_path="x")) == ""
    changed = resolve(**given, seed="1", eval_prompts="a" * 70)
    assert module.changed_settings(changed) == (
        f"seed=1 (before 2023), eval_prompts={'a' * 60}... (before )"
    )
    assert module.changed_settings(resolve(save_ckpt_path="runs/new")) == ""


def test_unknown_settings_of_another_version_do_not_prevent_a_resume(first_run):
    """A run whose config.yaml contains an unknown setting or preset can be resumed, and the message contains the path
    of the file. It is an error if the user gives this file as settings, or does not give the folder."""
    file = first_run / "runs/train/config.yaml"
    whole = file.read_text()
    file.write_text(f"old_knob: 7\n{whole}")
    given = resolve(dataset_path="data/a", d_model="64", seed="1")
    module.check_run_folder(given)
    unknown = r"old_knob: there is no such setting \(in .*runs/train/config.yaml\)"
    assert re.match(rf"seed=1 \(before 2023\); {unknown}", module.changed_settings(given))
    file.write_text(re.sub("model_name: .*", "model_name: mamba-9", whole))
    message = r"model_name=mamba-9: there is no such preset \(in .*runs/train/config.yaml\)"
    named = resolve(save_ckpt_path="runs/train")
    module.check_run_folder(named)
    assert re.match("unknown; " + message, module.changed_settings(named))
    for start in (lambda: module.check_run_folder(resolve()), lambda: resolve(str(file))):
        with pytest.raises(UserError, match=message):
            start()
    resolve(str(file), model_name="demo")


def test_the_recipe_of_a_named_model_is_reported():
    assert module.note_on_recipe(resolve()) == []
    given = {"seq_length": "8", "learning_rate": "1"}
    assert module.note_on_recipe(resolve(init_from="x.pth", **given)) == []
    (note,) = module.note_on_recipe(resolve(init_from="x.pth"))
    assert "learning_rate=0.0003" in note and "the recipe for trained weights (others) in" in note
    (note,) = module.note_on_recipe(resolve(model_name="mamba-130m", batch_size="4"))
    assert note.startswith("seq_length=2048, global_batch_size=256, num_steps=")
    assert ": from the recipe mamba-130m in " in note and "batch_size=4" not in note


DATASET_MISTAKES = {
    "documents=words": "write file, lines, blank_line or separator:TEXT",
    "tokenizer=none": "give the token id that ends documents",
    "tokenizer=none eos_token=x pack=none vocab_size=9": "give the token id that ends documents",
    "tokenizer=none eos_token=0": "give --vocab_size=N too",
    "vocab_size=9": "is for --tokenizer=none",
    "strip_tokens=1,x": "give token ids",
    "splits=official split=all": "give only one of them",
    "delimiter=;;": "give one character",
    "part=4/4": "the parts of 4 are 0/4 to 3/4",
    "part=half": "the parts of 4 are 0/4 to 3/4",
    "part=7/6": "the parts of 6 are 0/6 to 5/6",
    "part=0/2 overwrite=true": "would remove what other parts have done",
}
DATASET_OPTIONS = [
    "documents=separator:x delimiter=; strip_tokens=1,2 split=all overwrite=true",
    "tokenizer=none eos_token=0 vocab_size=9 splits=official",
    "tokenizer=none pack=none vocab_size=9 part=2/3",
]


def dataset_options(text):
    def verb(options: DatasetConfig):
        return options

    return command_line.call(verb, [f"--{word}" for word in text.split()])


def test_options_of_get_dataset_that_exclude_each_other_are_refused():
    for text, message in DATASET_MISTAKES.items():
        with pytest.raises(UserError, match=message):
            dataset_options(text).check()
    for text in DATASET_OPTIONS:
        dataset_options(text).check()


def test_null_in_a_file_is_the_default(tmp_path):
    """null in a settings file means the default, not a file of that name or the home folder. In quotes, null is
    text."""
    file = tmp_path / "run.yaml"
    names = ("load_ckpt_path", "eval_prompts", "init_from", "learning_rate")
    file.write_text(
        "".join(f"{name}: {null}\n" for name, null in zip(names, ("null", "~", "None", "")))
    )
    assert resolve(file) == resolve()
    file.write_text("wandb_name: 'null'\ntracker: wandb\n")
    assert resolve(file).report.wandb_name == "null"


def test_a_variable_in_a_path_is_refused_with_its_value(monkeypatch):
    monkeypatch.setenv("SCRATCH", "/scratch/me")
    for path in ("$SCRATCH/run", "${SCRATCH}/run"):
        assert "not expanded here; write /scratch/me/run" in refused(save_ckpt_path=path)
    assert resolve(save_ckpt_path="runs/a$").checkpoint.save_ckpt_path == "runs/a$"
