"""From the command line, a YAML file, a preset and the defaults to one checked TrainConfig; the
help page; the YAML form.

Order of precedence: command line, then --config FILE.yaml, then the preset that model_name names,
then the defaults. Every value is read by the type of its field, never guessed: a run id 0123 stays
text.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from config import fields, other_launchers, presets
from config.fields import Duration, help_lines, shown
from config.given import Given
from config.model_config import ModelConfig
from config.presets import preset, usual_length
from config.text_yaml import load_yaml
from config.train_config import SECTIONS, TrainConfig, all_settings
from mamba_fsdp.errors import UserError


def resolve_settings(
    given: Mapping[str, Any], config_file: str | None = None, stray: Sequence[str] = ()
) -> tuple[TrainConfig, set[str]]:
    """The TrainConfig of what is `given` (name -> text) over `config_file`, the preset and the
    defaults.

    Returns (settings, explicit): explicit is the set of leaf names that the command line or the
    file set. A setting of the file that does nothing only because of the command line is dropped.
    Words of other launchers are taken where they mean the same (config/other_launchers.yaml), and
    told in the settings' `notes`. Raises UserError for unknown names (with the nearest), values of
    the wrong type or out of bounds, all of these at once; for settings that do nothing, impossible
    combinations, and `stray` words, which name no setting.
    """
    if stray:
        raise UserError(f"{stray[0]}: settings are written --name=value")
    on_line = Given(given, "on the command line")
    in_file = read_file(config_file)
    check_none([*on_line.mistakes.values(), *in_file.mistakes.values()])
    drop_alternatives(in_file.values, on_line.values)
    chosen = {**in_file.values, **on_line.values}
    _build(chosen).check()
    notes = [*in_file.notes.values(), *on_line.notes.values()]
    notes += drop_pointless(chosen, on_line, in_file)
    settings = _build(chosen)
    settings.notes = notes
    return settings, set(chosen)


# ---------------------------------------------------------------- files


def read_file(name: str | None) -> Given:
    """What the file `name` gives; nothing without one. Raises UserError where it can't be read."""
    if not name:
        return Given({}, "")
    path = find_config_file(name)
    content = load_yaml(path)
    of_run = SECTIONS.keys() <= content.keys()  # only a run writes all of them
    return Given(flatten(content, path), f"in {path}", of_run)


def ready_runs() -> dict[str, Path]:
    """{name: its YAML file} of the runs in config/ and its recipes/."""
    tables = (other_launchers.FILE, presets.FILE)
    files = Path(__file__).parent.rglob("*.yaml")
    return {path.stem: path for path in files if path not in tables}


def find_config_file(name: str) -> Path:
    """The path of a YAML file given as a path or as the name of a ready run. Raises UserError."""
    ready = ready_runs()
    for path in (Path(name), ready.get(name)):
        if path and path.is_file():
            return path
    hint = f"give a path or one of {', '.join(sorted(ready))}"
    same = other_launchers.content()["ready_runs"].get(Path(name).stem)
    if same:
        hint = f"that run is --config={same} here"
    raise UserError(f"config: there is no file {name}; {hint}")


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
        elif value:
            raise UserError(f"{path}: {key} is a section; put its settings below it")
    return flat


# ---------------------------------------------------------------- what can't be


def check_none(mistakes: Sequence[str]) -> None:
    """Raises UserError with all of these sentences, one a line, if there are any."""
    if len(mistakes) > 1:
        mistakes = [f"{len(mistakes)} mistakes:", *mistakes]
    if mistakes:
        raise UserError("\n  ".join(mistakes))


def drop_alternatives(in_file: dict[str, Any], on_line: dict[str, Any]) -> None:
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
                    f"{name}={shown(place[name])} stands in place of {other}={shown(place[other])}; "
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
            wrong.append(f"{sentence}; leave it out (on the command line)")
        elif name in in_file_alone and not in_file.of_run:
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
        section, leaf = all_settings()[name]
        value = getattr(getattr(settings, section), name)
        if value != usual[name] and not _works(name, settings):
            needs = leaf.metadata["needs"].words
            found[name] = f"{name}={shown(value)} does nothing without {needs}"
    return found


def _works(name: str, settings: TrainConfig) -> bool:
    """Whether setting `name` has an effect in `settings`."""
    needs = all_settings()[name][1].metadata["needs"]
    return needs is None or needs.met(settings)


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
    values["seq_length"] = usual_length(model_name)
    return values


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
            settings.data.seq_length = usual_length(settings.model.model_name)
    check_same_model(settings, model, source)
    given = there.keys() & set(explicit)
    check_none([f"{line}; leave it out" for line in pointless(settings, given, there).values()])


def check_same_model(
    settings: TrainConfig, model: ModelConfig, source: str, remedy: str = ""
) -> None:
    """Raises UserError, naming the settings, where the `model` that `source` holds is not that of
    `settings`."""
    differing = [
        f"{name}={now} (there {there})"
        for name, (now, there) in differing_model(settings, model).items()
    ]
    if differing:
        raise UserError(
            f"{source} holds another model than the settings ask for: {', '.join(differing)}{remedy}"
        )


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
        if now[name] != there[name] and ours != theirs and _works(name, settings):
            found[name] = (ours, theirs)
    return found


# ---------------------------------------------------------------- as YAML, and as a help page


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

    return yaml.safe_dump(as_dict(settings), sort_keys=False)


def help_page() -> str:
    """Every setting with its type, bounds, default, meaning and other names."""
    lines = [
        "Train a Mamba language model. The same command again resumes after a stop or a crash.",
        "",
        "  python training.py [--config=FILE.yaml] [--SETTING=VALUE ...]",
        "",
        "A setting may carry its section (--optimizer.learning_rate) and stand in YAML, flat or in sections.",
        "The command line wins over --config, that over the preset named by model_name, that over the defaults.",
        "Whole numbers may end in k, M, B or T (10k, 1.5M); durations are steps (10k), or tokens (2Btok).",
        "Words of other launchers work where they mean the same: docs/from-*.md, config/other_launchers.yaml.",
    ]
    for section, kind in SECTIONS.items():
        lines += ["", f"{section}: {' '.join(kind.__doc__.split())}"]
        lines += help_lines(kind)
    return "\n".join(lines)
