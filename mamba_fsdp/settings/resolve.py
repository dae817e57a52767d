"""From the command line, a YAML file, a preset with its recipe and the defaults to one checked TrainConfig, and its YAML
form.

Order of precedence: command line, then --config FILE.yaml, then the preset that model_name names,
then the defaults. Every value is read by the type of its field, never guessed: a run id 0123 stays
text.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mamba_fsdp.errors import UserError
from mamba_fsdp.run_layout import CHECKPOINTS, SETTINGS, committed
from mamba_fsdp.settings import fields, other_launchers, presets
from mamba_fsdp.settings.fields import Duration, Needs, shown
from mamba_fsdp.settings.given import Given
from mamba_fsdp.settings.model_config import ModelConfig, read_by_layers
from mamba_fsdp.settings.presets import preset, recipe
from mamba_fsdp.settings.text_yaml import load_yaml
from mamba_fsdp.settings.train_config import (
    SECTIONS,
    CheckpointConfig,
    TrainConfig,
    all_settings,
)
from mamba_fsdp.storage import exists

# A link to config/; an installed package holds its files.
READY_RUNS = Path(__file__).with_name("ready_runs").resolve()
MOST_MISTAKES = 20  # that are told: a file may be none of settings at all
VERSION = "1"  # of a run's config.yaml


def resolve_settings(
    given: Mapping[str, Any],
    config_file: str | None = None,
    stray: Sequence[str] = (),
    where: str = "on the command line",
) -> tuple[TrainConfig, set[str]]:
    """The TrainConfig of what is `given` (name -> text) over `config_file`, the preset and the
    defaults.

    Returns (settings, explicit): explicit is the set of leaf names that the command line or the
    file set. A setting of the file that does nothing only because of the command line is dropped.
    Words of other launchers are taken where they mean the same (mamba_fsdp/settings/other_launchers.yaml), and
    told in the settings' `notes`. Raises UserError for unknown names (with the nearest), values of
    the wrong type or out of bounds, all of these at once; for settings that do nothing, impossible
    combinations, and `stray` words, which name no setting. where: as in "on the command line".
    """
    if stray:
        raise UserError(f"{stray[0]}: settings are written --name=value")
    on_line = Given(given, where)
    in_file = read_file(config_file)
    check_none([*on_line.mistakes.values(), *in_file.mistakes.values()])
    drop_alternatives(in_file.values, on_line.values)
    chosen = {**in_file.values, **on_line.values}
    implied = {**in_file.implied, **on_line.implied}
    drop_alternatives(implied, chosen)
    chosen = implied | chosen
    _build(chosen).check()
    notes = [*in_file.notes.values(), *on_line.notes.values()]
    notes += drop_pointless(chosen, on_line, in_file)
    settings = _build(chosen)
    settings.notes = notes
    names_data = {"dataset_path", "datasets", "use_dummy_dataset"} & on_line.values.keys()
    places = [on_line] if names_data else [on_line, in_file]
    settings.names_folder = any("save_ckpt_path" in place.values for place in places)
    return settings, set(chosen)


# ---------------------------------------------------------------- files


def read_file(name: str | None) -> Given:
    """What the file `name` gives, a path or a ready run, or the recipe of that name; nothing without
    one. Raises UserError where it can't be read."""
    if not name:
        return Given({}, "")
    path = find_config_file(name)
    if path is None:
        return Given({"model_name": name}, f"in {presets.RECIPES_FILE}")
    content = load_yaml(path)
    version = content.pop("version", None)  # only a run writes it
    if version not in (None, VERSION):
        raise UserError(
            f"{path}: settings of version {version}; this version of the program reads version {VERSION}"
        )
    return Given(flatten(content, path), f"in {path}", is_of_run=version is not None)


def read_run(folder: Path) -> Given | None:
    """The settings of the run in `folder`; None where there is none with a checkpoint, or they can't
    be read."""
    file = folder / SETTINGS
    if not exists(file) or not committed(folder / CHECKPOINTS):
        return None
    try:
        return read_file(str(file))
    except UserError:
        return None


def check_experiment(settings: TrainConfig) -> None:
    """Raises UserError where no run folder is given for these settings and the usual one holds a run
    of another model or on other data."""
    folder = settings.checkpoint.save_ckpt_path
    run = None if settings.names_folder else read_run(Path(folder))
    if run is None:
        return
    there = _build(run.values)
    differing = {}
    if not settings.checkpoint.init_from:
        differing = differing_model(settings, there.model)
    if not settings.data.places() & there.data.places():
        differing["dataset_path"] = (settings.data.dataset_path, there.data.dataset_path)
    if differing:
        raise UserError(
            f"{folder} holds another run: {_listed(differing)}; name a folder for this one, as in "
            f"save_ckpt_path={folder}-2; to resume that one, give its settings again"
        )


def ready_runs() -> dict[str, Path]:
    """{name: its YAML file} of the runs in config/."""
    return {path.stem: path for path in READY_RUNS.glob("*.yaml")}


def find_config_file(name: str) -> Path | None:
    """The path of a YAML file given as a path or as the name of a ready run; None for the name of a
    recipe. Raises UserError."""
    ready = ready_runs()
    path = Path(name)
    if not path.is_file():
        path = ready.get(name, path)
    if path.is_file():
        return path
    if path.is_dir():
        raise UserError(f"config: {name} is a folder; give the path of a YAML file in it")
    same = other_launchers.content()["ready_runs"].get(Path(name).stem)
    if same:
        raise UserError(f"config: there is no file {name}; that run is --config={same} here")
    if "/" in name or presets.plain(name) not in presets.SPELLINGS:
        hint = f"give a path, a model's name or one of {', '.join(sorted(ready))}"
        raise UserError(f"config: there is no file {name}; {hint}")
    return None


def flatten(content: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """{section: {name: value}} or {name: value} or both -> {name or section.name: value}. Sections
    may be others'."""
    sections = [*SECTIONS, *other_launchers.content()["sections"].split()]
    flat = {}
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


# ---------------------------------------------------------------- what can't be


def check_none(mistakes: Sequence[str]) -> None:
    """Raises UserError with these sentences, one a line, if there are any."""
    if len(mistakes) > 1:
        mistakes = [f"{len(mistakes)} mistakes:", *mistakes[:MOST_MISTAKES]]
    if mistakes:
        raise UserError("\n  ".join(mistakes))


def drop_alternatives(in_file: dict[str, Any], on_line: Mapping[str, Any]) -> None:
    """Of two settings in place of each other, drops the file's where the command line gives the
    other. Raises UserError where one place gives both; a run's config.yaml has both, one of them
    with its default."""
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


# ---------------------------------------------------------------- what does nothing


def drop_pointless(chosen: dict[str, Any], on_line: Given, in_file: Given) -> list[str]:
    """Drops from `chosen` what has no effect. Returns notes on what other launchers take although
    it does nothing.

    Raises UserError for what a user gave in our words; a run's own file may hold it, and so may a
    file where only the command line makes it pointless.
    """
    settings = _build(chosen)
    in_file_alone = pointless(_build(in_file.values), in_file.values, _usual(in_file.values))
    theirs = on_line.theirs() | (in_file.theirs() - on_line.values.keys())
    notes = []
    wrong = []
    for name, sentence in pointless(settings, chosen, _usual(chosen)).items():
        if settings.checkpoint.init_from and name in vars(settings.model):
            continue  # the weights decide the layers: see adopt_model
        del chosen[name]
        if name in theirs:
            notes.append(sentence)
        elif name in on_line.values:
            wrong.append(f"{sentence}; leave it out ({on_line.where})")
        elif name in in_file_alone and not in_file.is_of_run:
            wrong.append(f"{sentence}; leave it out ({in_file.where})")
    check_none(wrong)
    return notes


def pointless(
    settings: TrainConfig, names: Iterable[str], usual: Mapping[str, Any]
) -> dict[str, str]:
    """{setting: a sentence} for those of `names` that have no effect in `settings`. To give the
    `usual` value is no mistake."""
    found = {}
    for name in names:
        value = settings.value(name)
        needs = needs_of(name)
        if value != usual[name] and needs and not needs.met(settings):
            found[name] = f"{name}={shown(value)} does nothing without {needs.words}"
    return found


def needs_of(name: str) -> Needs | None:
    """What setting `name` needs to have an effect."""
    _, leaf = all_settings()[name]
    return leaf.metadata["needs"] or read_by_layers(name)


def _build(chosen: Mapping[str, Any]) -> TrainConfig:
    """The TrainConfig of these values on top of the preset and the defaults."""
    settings = TrainConfig()
    for name, value in {**_usual(chosen), **chosen}.items():
        section, _ = all_settings()[name]
        setattr(getattr(settings, section), name, value)
    return settings


def _usual(chosen: Mapping[str, Any]) -> dict[str, Any]:
    """The value of each setting that is not chosen: the preset's, else the default."""
    model_name = chosen.get("model_name", default("model_name"))
    values = {name: default(name) for name in all_settings()}
    values |= preset(model_name)
    path = chosen.get("load_ckpt_path", "")
    start = CheckpointConfig(load_ckpt_path=path, init_from=chosen.get("init_from", ""))
    trained = dict(recipe(model_name, from_weights=start.is_from_weights()))
    drop_alternatives(trained, chosen)
    return values | trained


def default(name: str) -> Any:
    """The default of the setting `name`."""
    return fields.default(all_settings()[name][1])


# ---------------------------------------------------------------- the model of weights


def adopt_model(
    settings: TrainConfig, model: ModelConfig, explicit: Collection[str], source: str
) -> None:
    """Gives `settings` the shape `model` of the weights that `source`, as init_from FOLDER, holds.
    Raises UserError for model settings that the user gave (`explicit`) and that disagree with it or
    do nothing."""
    there = vars(model)
    if "model_name" not in explicit:
        for name in there.keys() - set(explicit):
            setattr(settings.model, name, there[name])
        if "seq_length" not in explicit:
            settings.data.seq_length = recipe(settings.model.model_name)["seq_length"]
    check_same_model(settings, model, source)
    given = there.keys() & set(explicit)
    check_none([f"{line}; leave it out" for line in pointless(settings, given, there).values()])


def check_same_model(
    settings: TrainConfig, model: ModelConfig, source: str, remedy: str = ""
) -> None:
    """Raises UserError, naming the settings, where the `model` that `source` holds is not that of
    `settings`."""
    differing = differing_model(settings, model)
    if differing:
        raise UserError(
            f"{source} holds another model than the settings ask for: {_listed(differing)}{remedy}"
        )


def _listed(differing: Mapping[str, tuple[str, str]]) -> str:
    return ", ".join(f"{name}={now} (there {there})" for name, (now, there) in differing.items())


def differing_model(settings: TrainConfig, model: ModelConfig) -> dict[str, tuple[str, str]]:
    """{setting: (its value in `settings`, that in `model`), as written} of those that make another
    model of it. Empty for the same model, however it is described; what has no effect in `settings`
    does not count."""
    now = settings.model.structure()
    there = model.structure()
    found = {}
    for name in there:
        ours = shown(getattr(settings.model, name))
        theirs = shown(getattr(model, name))
        needs = needs_of(name)
        works = needs is None or needs.met(settings)
        if now.get(name) != there[name] and ours != theirs and works:
            found[name] = (ours, theirs)
    return found


# ---------------------------------------------------------------- as YAML


def as_dict(settings: TrainConfig) -> dict[str, dict[str, Any]]:
    """The settings as plain nested dict, for YAML and for state.json."""
    found: dict[str, dict[str, Any]] = {}
    for section in SECTIONS:
        values = vars(getattr(settings, section))
        found[section] = {
            name: str(value) if isinstance(value, Duration) else value
            for name, value in values.items()
        }
    return found


def as_yaml(settings: TrainConfig) -> str:
    """The settings as YAML, every section of them, for the run folder and for --config."""
    import yaml

    return yaml.safe_dump({"version": VERSION, **as_dict(settings)}, sort_keys=False)
