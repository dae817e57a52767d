"""Resolves the command line, a YAML file, the preset of a model with its recipe, and the defaults to one validated
TrainConfig, and writes it as YAML.

The command line has precedence over --config FILE.yaml, the file over the preset of model_name, and the preset over the
defaults. Values are parsed by the type of their field, so that a name such as 0123 stays text.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from mamba_fsdp import fields
from mamba_fsdp.errors import UserError
from mamba_fsdp.fields import Duration, format_value, parse
from mamba_fsdp.model.config import ModelConfig
from mamba_fsdp.model.presets import SPELLINGS, normalize_name, preset
from mamba_fsdp.run.layout import check_is_run_folder, list_committed
from mamba_fsdp.run.names import CHECKPOINTS, SETTINGS
from mamba_fsdp.settings import other_launchers
from mamba_fsdp.settings.parsed_settings import ParsedSettings
from mamba_fsdp.settings.recipes import (
    PUBLISHED,
    RECIPES_FILE,
    TUNED,
    default_recipe,
    recipe,
    recipe_name,
    tuned_recipe,
)
from mamba_fsdp.settings.train_config import (
    SECTIONS,
    WEIGHTS_FILES,
    TrainConfig,
    all_settings,
)
from mamba_fsdp.storage.retry import exists, is_file, is_folder, retry_io
from mamba_fsdp.storage.text_yaml import load_yaml

# This is a link to config/ in the repository; an installed package contains copies of the files.
READY_RUNS = Path(__file__).with_name("ready_runs").resolve()
# The number of mistakes to list in one message. A file that contains no settings at all could have thousands.
MAX_MISTAKES = 20
VERSION = "1"  # the format version of a run's config.yaml
# Settings that only matter when a run starts for the first time.
FIRST_START_ONLY = {"save_ckpt_path", "load_ckpt_path", "init_from", "resuming_dataset", "dry_run"}


def resolve_settings(
    args: Mapping[str, Any],
    config_file: str | None = None,
    stray: Sequence[str] = (),
    where: str = "on the command line",
) -> TrainConfig:
    """Resolves the settings of a run.

    A launch calls this once. Preflight and the ranks read the result with `read_resolved`.

    A setting in the file is dropped if it has no effect only because of the command line. Settings of other launchers
    (mamba_fsdp/settings/other_launchers.yaml) are translated; `notes` in the result describes the translation.

    args: {name: text} from the command line, with precedence over the file. config_file: a path, or the name of a ready
    run or a model. stray: arguments that are not of the form --name=value. where: describes the source of `args` in
    messages, for example "on the command line".

    Raises one UserError for all unknown names (with the most similar name) and for all values of the wrong type or out of
    bounds. Also raises UserError for settings without effect, for impossible combinations, and for `stray` arguments.
    """
    if stray:
        raise UserError(f"{stray[0]}: settings are written --name=value")
    on_line = ParsedSettings(args, where)
    in_file = read_file(config_file)
    raise_mistakes([*on_line.mistakes, *in_file.mistakes])
    drop_alternatives(in_file.values, on_line.values)
    chosen = {**in_file.values, **on_line.values}
    implied = {**in_file.alias_defaults, **on_line.alias_defaults}
    drop_alternatives(implied, chosen)
    chosen = implied | _recipe_of_run(chosen) | chosen
    if "model_name" not in on_line.values:
        check_preset(in_file)
    settings = _build(chosen)
    settings.check()
    notes = (*in_file.notes, *on_line.notes, *settings.notes)
    settings = drop_ineffective(replace(settings, notes=notes), chosen, on_line, in_file)
    settings = settings.with_values(eval_prompts=settings.training.read_prompts())
    names_data = {"dataset_path", "datasets", "use_dummy_dataset"} & on_line.values.keys()
    has_own_folder = "save_ckpt_path" in (on_line.values if names_data else chosen)
    return replace(settings, has_own_folder=has_own_folder)


# ---------------------------------------------------------------- files


def read_file(name: str | None) -> ParsedSettings:
    """Reads a settings file.

    name: a path, or the name of a ready run or a model. If it is empty or None, the result contains no settings. Raises
    UserError if the file can't be read."""
    if not name:
        return ParsedSettings({}, "")
    path = find_config_file(name)
    if path is None:
        return ParsedSettings({"model_name": name}, f"in {RECIPES_FILE}")
    content = load_yaml(path)
    version = content.pop("version", None)  # only a run's config.yaml has it
    if version not in (None, VERSION):
        raise UserError(
            f"{path} contains settings of version {version}, but this version of the program reads version {VERSION}; use "
            "the version that wrote the file"
        )
    given = {name: value for name, value in flatten(content, path).items() if value is not None}
    settings = ParsedSettings(given, f"in {path}", is_of_run=version is not None)
    if settings.is_of_run:
        settings.values.setdefault("recipe", PUBLISHED)  # older runs lack this setting
    return settings


def read_run(folder: Path) -> TrainConfig | None:
    """Reads the settings of the run in `folder`.

    Returns None if the run has no checkpoint. The result's `notes` list the settings in the file that this version of the
    program does not know. Raises UserError if the file can't be read."""
    file = folder / SETTINGS
    if not exists(file) or not list_committed(folder / CHECKPOINTS):
        return None
    written = read_file(str(file))
    check_preset(written)
    return replace(_build(written.values), notes=tuple(written.mistakes))


def read_settings_copy(file: Path) -> TrainConfig:
    """Reads the copy of all settings that each start leaves in its run folder. Raises UserError if it can't be read."""
    written = read_file(str(file))
    return replace(_build(written.values), explicit=frozenset(written.values))


def check_preset(written: ParsedSettings) -> None:
    """Raises UserError if model_name in the settings is not the name of a preset. The message contains the settings' file."""
    if "model_name" in written.values:
        preset(written.values["model_name"], f" ({written.where})")


def check_run_folder(settings: TrainConfig) -> None:
    """Raises UserError if the run folder contains other files than a run's. If the user gave no run folder, also raises
    UserError if the default folder contains a run with another model or with other data."""
    folder = settings.checkpoint.save_ckpt_path
    check_is_run_folder(folder)
    if settings.has_own_folder:
        return
    try:
        earlier = read_run(Path(folder))
    except UserError as error:
        raise UserError(
            f"{error}; to resume this run anyway, give save_ckpt_path={folder}"
        ) from None
    if earlier is None:
        return
    settings = with_vocabulary_of(settings, earlier.model)
    differing = {}
    if not settings.checkpoint.starts_from_model():
        differing = differing_model(settings, earlier.model)
    if not settings.data.absolute_paths() & earlier.data.absolute_paths():
        differing["dataset_path"] = (settings.data.dataset_path, earlier.data.dataset_path)
    if differing:
        raise UserError(
            f"{folder} contains another run: {_format_differences(differing)}; name a folder for this one, as in "
            f"save_ckpt_path={folder}-2; to resume the other run, give its settings again"
        )


def changed_settings(settings: TrainConfig) -> str:
    """Describes the settings that differ from the run's last start; "" if there are none.

    The text also lists what can't be compared, such as settings that this version does not know. It leaves out settings
    that only matter when a run starts for the first time."""
    try:
        earlier = read_run(Path(settings.checkpoint.save_ckpt_path))
    except UserError as error:
        return f"unknown; {error}"
    if earlier is None:
        return ""
    differing = {}
    for name in all_settings():
        # A file has the prompts without their last line break.
        now = format_value(settings.value(name)).rstrip()
        before = format_value(earlier.value(name)).rstrip()
        if now != before and name not in FIRST_START_ONLY:
            differing[name] = (_abbreviate(now), _abbreviate(before))
    return "; ".join(filter(None, [_format_differences(differing, "before"), *earlier.notes]))


def _abbreviate(text: str) -> str:
    """Shortens a setting's value to part of a line, because eval_prompts can be several pages long."""
    line = text.replace("\n", "\\n")
    return line if len(line) < 60 else f"{line[:60]}..."


def ready_runs() -> dict[str, Path]:
    """Returns {name: YAML file} for the ready runs in config/."""
    return {path.stem: path for path in READY_RUNS.glob("*.yaml")}


def find_config_file(name: str) -> Path | None:
    """Finds the settings file `name`: the path of a YAML file, or the name of a ready run.

    Returns None if `name` is the name of a model. Raises UserError for any other name."""
    ready = ready_runs()
    path = Path(name)
    if not is_file(path):
        path = ready.get(name, path)
    if is_file(path):
        return path
    if is_folder(path):
        raise UserError(f"config: {name} is a folder; give the path of a YAML file in it")
    same = other_launchers.load_table()["ready_runs"].get(Path(name).stem)
    if same:
        raise UserError(f"config: there is no file {name}; use --config={same} for this run")
    if "/" in name or normalize_name(name) not in SPELLINGS:
        hint = f"give a path, a model's name or one of {', '.join(sorted(ready))}"
        raise UserError(f"config: there is no file {name}; {hint}")
    return None


def flatten(content: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Flattens the sections in a settings file: {section: {name: value}} becomes {section.name: value}.

    Settings outside sections keep their names. The sections of other launchers are recognised too. Raises UserError if a
    section has a value instead of settings; the message contains `path`."""
    sections = [*SECTIONS, *other_launchers.load_table()["sections"].split()]
    flat: dict[str, Any] = {}
    for key, value in content.items():
        if key not in sections:
            flat[key] = value
        elif isinstance(value, dict):
            flat.update({f"{key}.{name}": inner for name, inner in value.items()})
        elif value and key in all_settings():
            flat[key] = value
        elif value:
            raise UserError(f"{path}: {key} is a section; put its settings below it")
    return flat


# ---------------------------------------------------------------- impossible combinations


def raise_mistakes(mistakes: Sequence[str]) -> None:
    """Raises UserError with these mistakes, one per line, if there are any."""
    if len(mistakes) > 1:
        mistakes = [f"{len(mistakes)} mistakes:", *mistakes[:MAX_MISTAKES]]
    if mistakes:
        raise UserError("\n  ".join(mistakes))


def drop_alternatives(in_file: dict[str, Any], on_line: Mapping[str, Any]) -> None:
    """Removes each setting from `in_file` that excludes a setting in `on_line` (see `instead_of` in `mamba_fsdp.fields.setting`).

    Raises UserError if one of the two contains both alternatives. A setting with its default value does not count: a run's
    config.yaml contains both alternatives, one of them with its default.
    """
    for name, (_, field) in all_settings().items():
        other = field.metadata["instead_of"]
        if not other:
            continue
        for place in (on_line, in_file):
            if _is_set_in(place, name) and _is_set_in(place, other):
                raise UserError(
                    f"{name}={format_value(place[name])} excludes {other}={format_value(place[other])}; "
                    "give one of them"
                )
        if _is_set_in(on_line, name):
            in_file.pop(other, None)
        if _is_set_in(on_line, other):
            in_file.pop(name, None)


def _is_set_in(place: Mapping[str, Any], name: str) -> bool:
    return name in place and place[name] != default(name)


# ---------------------------------------------------------------- settings without effect


def drop_ineffective(
    settings: TrainConfig, chosen: Mapping[str, Any], line: ParsedSettings, file: ParsedSettings
) -> TrainConfig:
    """Resets settings without effect to their defaults.

    Settings that have no effect are allowed in a run's own config.yaml, and in another file if they are without effect only
    because of the command line. Settings of other launchers, and settings of the model, are also allowed, and listed in the
    result's `notes`: one command line can be used for several models.

    Raises UserError for any other setting without effect that the user gave.
    """
    usual = _defaults_for(chosen)
    translated_settings = line.translated_settings()
    translated_settings |= file.translated_settings() - line.values.keys()
    mistakes = []
    notes = []
    dropped = {}
    for name, sentence in find_ineffective(settings, chosen, usual).items():
        if settings.checkpoint.starts_from_model() and name in vars(settings.model):
            continue  # the layers are not known before the weights are read: see adopt_model
        dropped[name] = usual[name]
        where = file.where
        if name in line.values:
            where = line.where
        elif file.is_of_run or not _is_ineffective_alone(name, file.values):
            where = ""
        if name in translated_settings or (where and name in vars(settings.model)):
            notes.append(sentence)
        elif where:
            mistakes.append(f"{sentence}; leave it out ({where})")
    raise_mistakes(mistakes)
    explicit = settings.explicit - dropped.keys()
    return replace(
        settings.with_values(**dropped), explicit=explicit, notes=(*settings.notes, *notes)
    )


def _is_ineffective_alone(name: str, values: Mapping[str, Any]) -> bool:
    """Returns whether the setting `name` has no effect with the values of a file alone, without a command line."""
    return name in values and bool(find_ineffective(_build(values), [name], _defaults_for(values)))


def find_ineffective(
    settings: TrainConfig, names: Iterable[str], usual: Mapping[str, Any]
) -> dict[str, str]:
    """Returns {setting: message} for each setting in `names` that has no effect in `settings`. Settings with their `usual`
    value do not count."""
    sentences = {}
    for name in names:
        value = settings.value(name)
        if value != usual[name] and not settings.has_effect(name):
            _, field = all_settings()[name]
            sentences[name] = fields.ineffective_message(field, value)
    return sentences


def _build(chosen: Mapping[str, Any]) -> TrainConfig:
    """Builds a TrainConfig from these values, the preset and the defaults."""
    settings = TrainConfig(explicit=frozenset(chosen))
    return settings.with_values(**{**_defaults_for(chosen), **chosen}).adjusted()


def _defaults_for(chosen: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the values that the settings have unless the user chooses others. They come from the preset, from its recipe, or
    from the defaults."""
    model_name = chosen.get("model_name", default("model_name"))
    values = {name: default(name) for name in all_settings()}
    values |= preset(model_name)
    from_file = chosen.get("load_ckpt_path", "").endswith(WEIGHTS_FILES)
    from_weights = from_file or bool(chosen.get("init_from"))
    trained = recipe(model_name, from_weights)
    trained |= {"recipe": default_recipe(model_name, from_weights)}
    if chosen.get("recipe", trained["recipe"]) == TUNED:
        trained |= tuned_recipe(values | trained, chosen)
    drop_alternatives(trained, chosen)
    return values | trained


def _recipe_of_run(chosen: Mapping[str, Any]) -> dict[str, str]:
    """Returns the recipe of the run that these settings resume, as a setting; an empty dict if they start a new run.

    A run keeps its recipe, even if this version of the program would choose another one for it."""
    folder = chosen.get("save_ckpt_path", default("save_ckpt_path"))
    file = Path(folder) / SETTINGS
    if not exists(file):
        return {}
    return {"recipe": read_file(str(file)).values["recipe"]}


def note_on_recipe(settings: TrainConfig) -> list[str]:
    """Returns a list with one note about the settings that come from a recipe, or an empty list if there are none.

    It is also empty for the default model, the demo, unless the run starts from trained weights."""
    from_weights = bool(settings.checkpoint.init_from)
    name_of_recipe = recipe_name(settings.model.model_name)
    from_recipe = [
        f"{name}={format_value(value)}"
        for name, value in recipe(name_of_recipe, from_weights).items()
        if name not in settings.explicit and settings.value(name) == value
    ]
    if from_weights:
        name_of_recipe = "for trained weights (others)"
    elif settings.model.model_name == default("model_name"):
        return []
    if not from_recipe:
        return []
    return [f"{', '.join(from_recipe)}: from the recipe {name_of_recipe} in {RECIPES_FILE}"]


def default(name: str) -> Any:
    """Returns the default of the setting `name`."""
    return fields.default(all_settings()[name][1])


# ---------------------------------------------------------------- the model of weights


def adopt_model(settings: TrainConfig, model: ModelConfig, source: str) -> TrainConfig:
    """Returns the settings with the shape of `model`, the model of the weights that the run starts from.

    source: describes the weights in messages, for example "init_from FOLDER". The result's `notes` list model settings
    without effect. Raises UserError if model settings that the user gave disagree with this shape."""
    shape = vars(model)
    explicit = shape.keys() & settings.explicit
    if "model_name" not in explicit:
        adopted = {name: shape[name] for name in shape.keys() - explicit}
        settings = settings.with_values(**adopted)
        if "seq_length" not in settings.explicit:
            length = recipe(settings.model.model_name)["seq_length"]
            settings = settings.with_values(seq_length=length)
    settings = with_vocabulary_of(settings, model)
    check_same_model(settings, model, source, "; leave out the settings that differ")
    settings.check_model()
    notes = find_ineffective(settings, explicit, shape).values()
    return replace(settings, notes=(*settings.notes, *notes))


def with_vocabulary_of(settings: TrainConfig, model: ModelConfig) -> TrainConfig:
    """Returns the settings with the vocabulary size of `model`, unless the user gave one.

    The vocabulary size depends on the tokenizer, even for a model that is chosen by name."""
    sizes = {"vocab_size", "pad_vocab_size_multiple"} - settings.explicit
    return settings.with_values(**{name: getattr(model, name) for name in sizes})


def check_same_model(
    settings: TrainConfig, model: ModelConfig, source: str, remedy: str = ""
) -> None:
    """Raises UserError if the settings describe another model than `model`. The message lists the settings that differ.

    source: describes in messages where `model` is from. remedy: the end of the message."""
    differing = differing_model(settings, model)
    if differing:
        raise UserError(
            f"{source} contains another model than the settings ask for: {_format_differences(differing)}{remedy}"
        )


def _format_differences(differing: Mapping[str, tuple[str, str]], where: str = "there") -> str:
    items = differing.items()
    return ", ".join(f"{name}={asked} ({where} {found})" for name, (asked, found) in items)


def differing_model(settings: TrainConfig, model: ModelConfig) -> dict[str, tuple[str, str]]:
    """Returns {setting: (value in `settings`, value in `model`)}, both as text, for all settings that differ.

    The result is empty if both describe the same model, even in different ways. Settings without effect in `settings` do
    not count.
    """
    asked_structure = settings.model.structure()
    differing = {}
    for name, found in model.structure().items():
        asked_text = format_value(settings.value(name))
        found_text = format_value(getattr(model, name))
        works = settings.has_effect(name)
        if asked_structure.get(name) != found and asked_text != found_text and works:
            differing[name] = (asked_text, found_text)
    return differing


# ---------------------------------------------------------------- writing


def as_dict(settings: TrainConfig) -> dict[str, dict[str, Any]]:
    """Returns the settings as a plain nested dict, for YAML and JSON."""
    sections: dict[str, dict[str, Any]] = {}
    for section in SECTIONS:
        values = vars(getattr(settings, section))
        sections[section] = {
            name: str(value) if isinstance(value, Duration) else value
            for name, value in values.items()
        }
    return sections


def as_yaml(settings: TrainConfig) -> str:
    """Returns all settings as YAML. The text can be read by --config; each run folder contains it as config.yaml."""
    import yaml

    return yaml.safe_dump({"version": VERSION, **as_dict(settings)}, sort_keys=False)


def as_json_object(settings: TrainConfig) -> dict[str, Any]:
    """Converts the resolved settings, including `explicit` and `notes`, to an object that JSON can represent. `read_resolved`
    reads it."""
    return {
        "settings": as_dict(settings),
        "explicit": sorted(settings.explicit),
        "notes": settings.notes,
    }


def read_resolved(path: Path) -> TrainConfig:
    """Reads the settings that the launcher resolved for this start and wrote to the file `path` with `as_json_object`."""
    # Read the file only once, because it is a pipe in a dry run.
    content = json.loads(retry_io(path.read_text, path))
    values = {}
    for section in content["settings"].values():
        for name, value in section.items():
            _, field = all_settings()[name]
            values[name] = parse(field.type, value)
    settings = TrainConfig(explicit=frozenset(content["explicit"]), notes=tuple(content["notes"]))
    return settings.with_values(**values)
