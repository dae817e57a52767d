"""Resolves the command line, a YAML file, a preset with its recipe and the defaults to one checked TrainConfig, and
writes it as YAML.

Order of precedence: command line, then --config FILE.yaml, then the preset that model_name names,
then the defaults. The type of a field decides how its value is read: a run id 0123 stays text.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from mamba_fsdp import fields
from mamba_fsdp.errors import UserError
from mamba_fsdp.fields import Duration, parse, shown
from mamba_fsdp.model.config import ModelConfig
from mamba_fsdp.model.presets import SPELLINGS, plain, preset
from mamba_fsdp.run.layout import check_is_run_folder, list_committed
from mamba_fsdp.run.names import CHECKPOINTS, SETTINGS
from mamba_fsdp.settings import other_launchers
from mamba_fsdp.settings.recipes import RECIPES_FILE, recipe, recipe_name
from mamba_fsdp.settings.train_config import (
    SECTIONS,
    WEIGHTS_FILES,
    TrainConfig,
    all_settings,
)
from mamba_fsdp.settings.written import Written
from mamba_fsdp.storage.patience import exists, is_file, is_folder, retry_io
from mamba_fsdp.storage.text_yaml import load_yaml

# A link to config/; an installed package holds the files themselves.
READY_RUNS = Path(__file__).with_name("ready_runs").resolve()
MOST_MISTAKES = 20  # reported at once: a file may hold no settings at all
VERSION = "1"  # of a run's config.yaml
OF_A_FIRST_START = {"save_ckpt_path", "load_ckpt_path", "init_from", "resuming_dataset", "dry_run"}


def resolve_settings(
    words: Mapping[str, Any],
    config_file: str | None = None,
    stray: Sequence[str] = (),
    where: str = "on the command line",
) -> TrainConfig:
    """Returns the TrainConfig of `words` ({name: text}) over `config_file`, the preset and the defaults.

    A launch calls this once; preflight and the ranks read the settings that it wrote, see `read_resolved`. A setting of
    the file that has no effect only because of the command line is dropped. Words of other launchers that mean the same
    are taken (mamba_fsdp/settings/other_launchers.yaml); the settings' `notes` say what they became. Raises one
    UserError for all unknown names (with the nearest name) and values of the wrong type or out of bounds. Also raises
    UserError for settings without effect, impossible combinations, and `stray` words, which name no setting. where: as
    in "on the command line".
    """
    if stray:
        raise UserError(f"{stray[0]}: settings are written --name=value")
    on_line = Written(words, where)
    in_file = read_file(config_file)
    check_none([*on_line.mistakes, *in_file.mistakes])
    drop_alternatives(in_file.values, on_line.values)
    chosen = {**in_file.values, **on_line.values}
    implied = {**in_file.implied, **on_line.implied}
    drop_alternatives(implied, chosen)
    chosen = implied | chosen
    if "model_name" not in on_line.values:
        check_preset(in_file)
    settings = _build(chosen)
    settings.check()
    notes = (*in_file.notes, *on_line.notes, *settings.notes)
    settings = drop_pointless(replace(settings, notes=notes), chosen, on_line, in_file)
    settings = settings.changed(eval_prompts=settings.training.read_prompts())
    names_data = {"dataset_path", "datasets", "use_dummy_dataset"} & on_line.values.keys()
    names_folder = "save_ckpt_path" in (on_line.values if names_data else chosen)
    return replace(settings, names_folder=names_folder)


# ---------------------------------------------------------------- files


def read_file(name: str | None) -> Written:
    """Returns the settings of `name`: a path, a ready run or a model; none if it is empty. Raises UserError if the file
    can't be read."""
    if not name:
        return Written({}, "")
    path = find_config_file(name)
    if path is None:
        return Written({"model_name": name}, f"in {RECIPES_FILE}")
    content = load_yaml(path)
    version = content.pop("version", None)  # only a run's config.yaml has it
    if version not in (None, VERSION):
        raise UserError(
            f"{path}: settings of version {version}; this version of the program reads version {VERSION}"
        )
    given = {name: value for name, value in flatten(content, path).items() if value is not None}
    return Written(given, f"in {path}", is_of_run=version is not None)


def read_run(folder: Path) -> TrainConfig | None:
    """Returns the settings of the run in `folder`; None if it has no checkpoint. Their notes name what this version of the
    program does not know in their file. Raises UserError if it can't read the file."""
    file = folder / SETTINGS
    if not exists(file) or not list_committed(folder / CHECKPOINTS):
        return None
    written = read_file(str(file))
    check_preset(written)
    return replace(_build(written.values), notes=tuple(written.mistakes))


def read_copy(file: Path) -> TrainConfig:
    """Returns all settings of a start, from the copy in its run folder. Raises UserError."""
    written = read_file(str(file))
    return replace(_build(written.values), explicit=frozenset(written.values))


def check_preset(written: Written) -> None:
    """Raises UserError, which names the file, if there is no preset of the name in it."""
    if "model_name" in written.values:
        preset(written.values["model_name"], f" ({written.where})")


def check_run_folder(settings: TrainConfig) -> None:
    """Raises UserError if the run folder holds something other than a run, or if the settings name no folder and the
    default one holds a run of another model or on other data."""
    folder = settings.checkpoint.save_ckpt_path
    check_is_run_folder(folder)
    if settings.names_folder:
        return
    try:
        earlier = read_run(Path(folder))
    except UserError as error:
        raise UserError(
            f"{error}; to resume this run all the same, name it: save_ckpt_path={folder}"
        ) from None
    if earlier is None:
        return
    settings = with_vocabulary_of(settings, earlier.model)
    differing = {}
    if not settings.checkpoint.begins_elsewhere():
        differing = differing_model(settings, earlier.model)
    if not settings.data.places() & earlier.data.places():
        differing["dataset_path"] = (settings.data.dataset_path, earlier.data.dataset_path)
    if differing:
        raise UserError(
            f"{folder} holds another run: {_listed(differing)}; name a folder for this one, as in "
            f"save_ckpt_path={folder}-2; to resume the other run, give its settings again"
        )


def changed_settings(settings: TrainConfig) -> str:
    """Returns, in words, which settings the run's last start had otherwise; "" if there are none. Names what can't be
    compared, such as a setting that this version does not know. Leaves out what matters to a first start alone."""
    try:
        earlier = read_run(Path(settings.checkpoint.save_ckpt_path))
    except UserError as error:
        return f"unknown; {error}"
    if earlier is None:
        return ""
    differing = {}
    for name in all_settings():
        now = shown(
            settings.value(name)
        ).rstrip()  # a file has the prompts without their last line break
        before = shown(earlier.value(name)).rstrip()
        if now != before and name not in OF_A_FIRST_START:
            differing[name] = (_in_short(now), _in_short(before))
    return "; ".join(filter(None, [_listed(differing, "before"), *earlier.notes]))


def _in_short(text: str) -> str:
    """Returns a setting's value in part of a line: eval_prompts may be pages."""
    line = text.replace("\n", "\\n")
    return line if len(line) < 60 else f"{line[:60]}..."


def ready_runs() -> dict[str, Path]:
    """Returns {name: its YAML file} of the runs in config/."""
    return {path.stem: path for path in READY_RUNS.glob("*.yaml")}


def find_config_file(name: str) -> Path | None:
    """Returns the path of the YAML file `name`, which is a path or a ready run; None for the name of a model. Raises
    UserError for any other name."""
    ready = ready_runs()
    path = Path(name)
    if not is_file(path):
        path = ready.get(name, path)
    if is_file(path):
        return path
    if is_folder(path):
        raise UserError(f"config: {name} is a folder; give the path of a YAML file in it")
    same = other_launchers.content()["ready_runs"].get(Path(name).stem)
    if same:
        raise UserError(f"config: there is no file {name}; that run is --config={same} here")
    if "/" in name or plain(name) not in SPELLINGS:
        hint = f"give a path, a model's name or one of {', '.join(sorted(ready))}"
        raise UserError(f"config: there is no file {name}; {hint}")
    return None


def flatten(content: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Returns {name or section.name: value} for {section: {name: value}}, {name: value} or both. The sections of other
    launchers are known too."""
    sections = [*SECTIONS, *other_launchers.content()["sections"].split()]
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


def check_none(mistakes: Sequence[str]) -> None:
    """Raises UserError with these sentences, one per line, if there are any."""
    if len(mistakes) > 1:
        mistakes = [f"{len(mistakes)} mistakes:", *mistakes[:MOST_MISTAKES]]
    if mistakes:
        raise UserError("\n  ".join(mistakes))


def drop_alternatives(in_file: dict[str, Any], on_line: Mapping[str, Any]) -> None:
    """Drops a setting of the file if the command line gives the setting that replaces it, or that it replaces.

    Raises UserError if one place gives both. A run's config.yaml has both, but one of them has its default, which does
    not count as given.
    """
    for name, (_, leaf) in all_settings().items():
        other = leaf.metadata["instead_of"]
        if not other:
            continue
        for place in (on_line, in_file):
            if _gives(place, name) and _gives(place, other):
                raise UserError(
                    f"{name}={shown(place[name])} excludes {other}={shown(place[other])}; "
                    "give one of them"
                )
        if _gives(on_line, name):
            in_file.pop(other, None)
        if _gives(on_line, other):
            in_file.pop(name, None)


def _gives(place: Mapping[str, Any], name: str) -> bool:
    return name in place and place[name] != default(name)


# ---------------------------------------------------------------- settings without effect


def drop_pointless(
    settings: TrainConfig, chosen: Mapping[str, Any], on_line: Written, in_file: Written
) -> TrainConfig:
    """Returns the settings with the usual value in place of chosen ones that have no effect, with a note for words of
    other launchers and for settings of the model, since one command line may serve several models.

    Raises UserError for any other such setting that the user gave. A run's own file may hold such settings, and so may
    another file if only the command line makes them pointless.
    """
    usual = _usual(chosen)
    in_others_words = on_line.in_others_words()
    in_others_words |= in_file.in_others_words() - on_line.values.keys()
    mistakes = []
    notes = []
    dropped = {}
    for name, sentence in pointless(settings, chosen, usual).items():
        if settings.checkpoint.begins_elsewhere() and name in vars(settings.model):
            continue  # the weights decide the layers: see adopt_model
        dropped[name] = usual[name]
        where = in_file.where
        if name in on_line.values:
            where = on_line.where
        elif in_file.is_of_run or not _is_pointless_alone(name, in_file.values):
            where = ""
        if name in in_others_words or (where and name in vars(settings.model)):
            notes.append(sentence)
        elif where:
            mistakes.append(f"{sentence}; leave it out ({where})")
    check_none(mistakes)
    explicit = settings.explicit - dropped.keys()
    return replace(settings.changed(**dropped), explicit=explicit, notes=(*settings.notes, *notes))


def _is_pointless_alone(name: str, values: Mapping[str, Any]) -> bool:
    """Returns whether the setting `name`, as these values of a file give it, has no effect even without a command
    line."""
    return name in values and bool(pointless(_build(values), [name], _usual(values)))


def pointless(
    settings: TrainConfig, names: Iterable[str], usual: Mapping[str, Any]
) -> dict[str, str]:
    """Returns {setting: a sentence} for each setting of `names` that has no effect in `settings`. A setting with its
    `usual` value does not count."""
    sentences = {}
    for name in names:
        value = settings.value(name)
        if value != usual[name] and not settings.has_effect(name):
            _, leaf = all_settings()[name]
            sentences[name] = fields.does_nothing(leaf, value)
    return sentences


def _build(chosen: Mapping[str, Any]) -> TrainConfig:
    """Returns the TrainConfig of these values on top of the preset and the defaults."""
    settings = TrainConfig(explicit=frozenset(chosen))
    return settings.changed(**{**_usual(chosen), **chosen}).fitted()


def _usual(chosen: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the value of each setting that is not chosen: from the preset and its recipe, or the default."""
    model_name = chosen.get("model_name", default("model_name"))
    values = {name: default(name) for name in all_settings()}
    values |= preset(model_name)
    from_file = chosen.get("load_ckpt_path", "").endswith(WEIGHTS_FILES)
    from_weights = from_file or bool(chosen.get("init_from"))
    trained = dict(recipe(model_name, from_weights))
    drop_alternatives(trained, chosen)
    return values | trained


def note_on_recipe(settings: TrainConfig) -> list[str]:
    """Returns a note on the settings that come from the recipe for trained weights, or of a named model other than the
    demo, if any do."""
    from_weights = bool(settings.checkpoint.init_from)
    name_of_recipe = recipe_name(settings.model.model_name)
    taken = [
        f"{name}={shown(value)}"
        for name, value in recipe(name_of_recipe, from_weights).items()
        if name not in settings.explicit and settings.value(name) == value
    ]
    if from_weights:
        name_of_recipe = "for trained weights (others)"
    elif settings.model.model_name == default("model_name"):
        return []
    if not taken:
        return []
    return [f"{', '.join(taken)}: the recipe {name_of_recipe} in {RECIPES_FILE}"]


def default(name: str) -> Any:
    """Returns the default of the setting `name`."""
    return fields.default(all_settings()[name][1])


# ---------------------------------------------------------------- the model of weights


def adopt_model(settings: TrainConfig, model: ModelConfig, source: str) -> TrainConfig:
    """Returns the settings with the shape of `model`, found with the weights in `source`, such as init_from FOLDER. Raises
    UserError if settings that the user gave disagree with this shape. A note names settings without effect."""
    shape = vars(model)
    explicit = shape.keys() & settings.explicit
    if "model_name" not in explicit:
        adopted = {name: shape[name] for name in shape.keys() - explicit}
        settings = settings.changed(**adopted)
        if "seq_length" not in settings.explicit:
            length = recipe(settings.model.model_name)["seq_length"]
            settings = settings.changed(seq_length=length)
    settings = with_vocabulary_of(settings, model)
    check_same_model(settings, model, source, "; leave out what differs")
    settings.check_model()
    notes = pointless(settings, explicit, shape).values()
    return replace(settings, notes=(*settings.notes, *notes))


def with_vocabulary_of(settings: TrainConfig, model: ModelConfig) -> TrainConfig:
    """Returns the settings with the size of the vocabulary of `model`, unless the user gave one: it follows a tokenizer,
    also in a model that is described by its name."""
    sizes = {"vocab_size", "pad_vocab_size_multiple"} - settings.explicit
    return settings.changed(**{name: getattr(model, name) for name in sizes})


def check_same_model(
    settings: TrainConfig, model: ModelConfig, source: str, remedy: str = ""
) -> None:
    """Raises UserError, which names the settings, if the `model` in `source` is not the model of
    `settings`."""
    differing = differing_model(settings, model)
    if differing:
        raise UserError(
            f"{source} holds another model than the settings ask for: {_listed(differing)}{remedy}"
        )


def _listed(differing: Mapping[str, tuple[str, str]], where: str = "there") -> str:
    items = differing.items()
    return ", ".join(f"{name}={asked} ({where} {held})" for name, (asked, held) in items)


def differing_model(settings: TrainConfig, model: ModelConfig) -> dict[str, tuple[str, str]]:
    """Returns {setting: (its value in `settings`, its value in `model`), as written} for the settings that make the
    models different.

    It is empty for the same model, however it is described; settings without effect in `settings` do not count.
    """
    asked_structure = settings.model.structure()
    differing = {}
    for name, held in model.structure().items():
        asked_text = shown(settings.value(name))
        held_text = shown(getattr(model, name))
        works = settings.has_effect(name)
        if asked_structure.get(name) != held and asked_text != held_text and works:
            differing[name] = (asked_text, held_text)
    return differing


# ---------------------------------------------------------------- written down


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
    """Returns all settings as YAML, for the run folder and for --config."""
    import yaml

    return yaml.safe_dump({"version": VERSION, **as_dict(settings)}, sort_keys=False)


def as_plain(settings: TrainConfig) -> dict[str, Any]:
    """Returns the resolved settings, with `explicit` and `notes`, as JSON has them, for `read_resolved`."""
    return {
        "settings": as_dict(settings),
        "explicit": sorted(settings.explicit),
        "notes": settings.notes,
    }


def read_resolved(path: Path) -> TrainConfig:
    """Returns the settings that the launcher of this start resolved and wrote into the file `path`."""
    content = json.loads(retry_io(path.read_text, path))  # a dry run's is a pipe
    values = {}
    for section in content["settings"].values():
        for name, value in section.items():
            _, leaf = all_settings()[name]
            values[name] = parse(leaf.type, value)
    settings = TrainConfig(explicit=frozenset(content["explicit"]), notes=tuple(content["notes"]))
    return settings.changed(**values)
