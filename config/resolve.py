"""From the command line, a YAML file, a preset and the defaults to one checked TrainConfig; the help page; the YAML
form.

Order of precedence: command line, then --config FILE.yaml, then the preset that model_name names, then the defaults.
Every value is read by the type of its field, never guessed: a run id 0123 stays text.
"""

import dataclasses
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from config import fields, other_launchers
from config.fields import Duration, help_lines, near_name, read_field, shown
from config.model_config import ModelConfig
from config.presets import preset, usual_length
from config.retired import RETIRED, RETIRED_VALUES
from config.text_yaml import load_yaml
from config.train_config import TrainConfig
from mamba_fsdp.errors import UserError

SECTIONS: dict[str, Any] = {
    section.name: section.default_factory for section in dataclasses.fields(TrainConfig)
}


@lru_cache(maxsize=None)
def all_settings() -> dict[str, tuple[str, dataclasses.Field]]:
    """{leaf name: (section name, dataclass field)}."""
    found: dict[str, tuple[str, dataclasses.Field]] = {}
    for section, kind in SECTIONS.items():
        for leaf in dataclasses.fields(kind):
            assert leaf.name not in found, f"two settings are called {leaf.name}"
            found[leaf.name] = (section, leaf)
    assert not found.keys() & SECTIONS.keys(), "a setting is called like a section"
    return found


@lru_cache(maxsize=None)
def aliases() -> dict[str, str]:
    """{any accepted name: leaf name}."""
    names = {}
    for name, (section, leaf) in all_settings().items():
        for known in (name, *leaf.metadata["aliases"]):
            names[known] = names[f"{section}.{known}"] = name
    return names


def resolve_settings(
    given: Mapping[str, Any], config_file: str | None = None, stray: Sequence[str] = ()
) -> tuple[TrainConfig, set[str]]:
    """The TrainConfig of what is `given` (name -> text) over `config_file`, the preset and the defaults.

    Returns (settings, explicit): explicit is the set of leaf names that the command line or the file set. A setting of
    the file that does nothing only because of the command line is dropped. Words of other launchers are taken where
    they mean the same (config/other_launchers.yaml), and told in the settings' `notes`. Raises UserError for unknown names
    (with the nearest), values of the wrong type or out of bounds, all of these at once; for settings that do nothing,
    impossible combinations, and `stray` words, which name no setting.
    """
    if stray:
        raise UserError(f"{stray[0]}: settings are written --name=value")
    path = find_config_file(config_file) if config_file else None
    on_line = Place(given, "on the command line")
    content = load_yaml(path) if path else {}
    in_file = Place(flatten(content, path) if path else {}, f"in {path}", of_run=is_of_run(content))
    _refuse(on_line, in_file, path)
    leave_out(in_file.chosen, on_line.chosen)
    chosen = {**in_file.chosen, **on_line.chosen}
    settings = _build(chosen)
    settings.check()
    notes, wrong = [*in_file.notes.values(), *on_line.notes.values()], []
    if launcher := other_launchers.launcher_of({**in_file.given, **on_line.given}):
        notes.append(
            f"the defaults here are not those of {other_launchers.content()['launchers'][launcher]}: docs/from-{launcher}.md"
        )
    pointless_in_file = _pointless(_build(in_file.chosen), in_file.chosen, _usual(in_file.chosen))
    for name, sentence in _pointless(settings, chosen, _usual(chosen)).items():
        if settings.checkpoint.init_from and name in vars(settings.model):
            continue  # the weights decide the layers: see take_model
        if name in on_line.foreign or name in in_file.foreign and name not in on_line.chosen:
            notes.append(
                sentence.removesuffix("; leave it out")
            )  # their programs take what does nothing
        elif name in on_line.chosen:
            wrong.append(f"{sentence} (on the command line)")
        elif name in pointless_in_file:
            wrong.append(f"{sentence} (in {path})")
        del chosen[name]
    check_all(wrong)
    settings = _build(chosen)
    settings.notes = notes
    return settings, set(chosen)


def _refuse(on_line: "Place", in_file: "Place", path: Path | None) -> None:
    """Raises UserError with all mistakes at once, if any."""
    launcher = other_launchers.launcher_of(in_file.given)
    hint = f"docs/from-{launcher}.md says what differs here" if launcher else ""
    check_all(
        [*on_line.mistakes.values(), *in_file.mistakes.values()], hint if in_file.mistakes else ""
    )


def check_all(mistakes: Sequence[str], hint: str = "") -> None:
    """Raises UserError with these sentences, if any, one a line, and a hint; words of which the same is said stand
    together."""
    if mistakes:
        said: dict[str, list[str]] = {}
        for mistake in mistakes:
            word, colon, sentence = mistake.partition(": ")
            said.setdefault(colon + sentence or mistake, []).append(word * bool(colon))
        lines = [", ".join(words) + sentence for sentence, words in said.items()]
        lines = lines if len(mistakes) == 1 else [f"{len(mistakes)} mistakes:", *lines]
        raise UserError("\n  ".join([*lines, hint] if hint else lines))


def leave_out(in_file: dict[str, Any], on_line: dict[str, Any]) -> None:
    """Of two settings in place of each other, the command line's stands. Raises UserError where one place has both."""
    for name, (_, leaf) in all_settings().items():
        if not (other := leaf.metadata["instead_of"]):
            continue
        for place in (on_line, in_file):  # a config.yaml has both, one of them with its default
            given = [
                each for each in (name, other) if each in place and place[each] != default(each)
            ]
            if len(given) == 2:
                raise UserError(
                    f"{name}={shown(place[name])} stands in place of {other}={shown(place[other])}; give "
                    "one of them"
                )
        for one, another in ((name, other), (other, name)):
            if one in on_line and on_line[one] != default(one):
                in_file.pop(another, None)


def _build(chosen: dict[str, Any]) -> TrainConfig:
    """The TrainConfig of these values on top of the preset and the defaults."""
    settings = TrainConfig()
    for name, value in {**_usual(chosen), **chosen}.items():
        setattr(getattr(settings, all_settings()[name][0]), name, value)
    return settings


def _usual(chosen: dict[str, Any]) -> dict[str, Any]:
    """The value of each setting that is not chosen: the preset's, else the default."""
    name = chosen.get("model_name", default("model_name"))
    return {
        **{name: default(name) for name in all_settings()},
        **preset(name),
        "seq_length": usual_length(name),
    }


def _pointless(
    settings: TrainConfig, names: Iterable[str], usual: dict[str, Any]
) -> dict[str, str]:
    """{setting: an error message} for those of `names` that have no effect in `settings`. To give the `usual` value is
    no mistake."""
    found = {}
    for name in names:
        section, leaf = all_settings()[name]
        value = getattr(getattr(settings, section), name)
        if value != usual[name] and not _works(name, settings):
            found[name] = (
                f"{name}={shown(value)} does nothing without {leaf.metadata['needs'].words}; leave it out"
            )
    return found


def _works(name: str, settings: TrainConfig) -> bool:
    """Whether setting `name` has an effect in `settings`."""
    needs = all_settings()[name][1].metadata["needs"]
    return needs is None or bool(needs.met(settings))


def take_model(
    settings: TrainConfig, model: ModelConfig, explicit: Collection[str], source: str
) -> None:
    """Gives `settings` the shape `model` of the weights that `source`, as init_from FOLDER, holds. Raises UserError for
    model settings that the user gave (`explicit`) and that disagree with it or do nothing."""
    there = vars(model)
    if "model_name" not in explicit:
        for name in there.keys() - set(explicit):
            setattr(settings.model, name, there[name])
        if "seq_length" not in explicit:
            settings.data.seq_length = usual_length(settings.model.model_name)
    check_same_model(settings, model, source)
    for sentence in _pointless(settings, there.keys() & set(explicit), there).values():
        raise UserError(sentence)


def check_same_model(
    settings: TrainConfig, model: ModelConfig, source: str, remedy: str = ""
) -> None:
    """Raises UserError, naming the settings, where the `model` that `source` holds is not that of `settings`."""
    differing = [
        f"{name}={now} (there {there})"
        for name, (now, there) in differing_model(settings, model).items()
    ]
    if differing:
        raise UserError(
            f"{source} holds another model than the settings ask for: {', '.join(differing)}{remedy}"
        )


def differing_model(settings: TrainConfig, model: ModelConfig) -> dict[str, tuple[str, str]]:
    """{setting: (its value in `settings`, that in `model`), as written} of those that make another model of it. Empty
    for the same model, however it is described; what has no effect in `settings` does not count."""
    now, there = settings.model.structure(), model.structure()
    written = {
        name: (shown(getattr(settings.model, name)), shown(getattr(model, name))) for name in there
    }
    return {
        name: (ours, theirs)
        for name, (ours, theirs) in written.items()
        if now[name] != there[name] and ours != theirs and _works(name, settings)
    }


def default(name: str) -> Any:
    return fields.default(all_settings()[name][1])


def ready_runs() -> dict[str, Path]:
    """{name: its YAML file} of the runs in config/ and its recipes/."""
    files = Path(__file__).parent.rglob("*.yaml")
    return {path.stem: path for path in files if path != other_launchers.FILE}


def find_config_file(name: str) -> Path:
    """The path of a YAML file given as a path or as the name of a ready run. Raises UserError."""
    here = ready_runs()
    for path in (Path(name), here.get(name)):
        if path and path.is_file():
            return path
    ready = ", ".join(sorted(here))
    same = other_launchers.content()["ready_runs"].get(Path(name).stem)
    hint = f"that run is --config={same} here" if same else f"give a path or one of {ready}"
    raise UserError(f"config: there is no file {name}; {hint}")


def flatten(content: dict[str, Any], path: Path) -> dict[str, Any]:
    """{section: {name: value}} or {name: value} or both -> {name or section.name: value}. Sections may be others'."""
    flat = {}
    for key, value in content.items():
        if key not in (*SECTIONS, *other_launchers.content()["sections"].split()):
            flat[key] = value
        elif isinstance(value, dict):
            flat.update({f"{key}.{name}": inner for name, inner in value.items()})
        elif value:
            raise UserError(f"{path}: {key} is a section; put its settings below it")
    return flat


def is_of_run(content: Mapping[str, Any]) -> bool:
    """Whether the content of a YAML file was written by a run: that has every section."""
    return SECTIONS.keys() <= content.keys()


class Taken(NamedTuple):
    """By which word a setting was given: a name of ours, or another launcher's; and whether it gives way to others."""

    key: str
    own: bool
    weak: bool


class Place:
    """What the command line or a file gives: settings by our names; notes and mistakes, by the words as given."""

    def __init__(self, given: Mapping[str, Any], where: str, of_run: bool = False) -> None:
        """of_run: an earlier run wrote it, so that retired settings are no mistake of the user."""
        self.given, self.where, self.of_run = given, where, of_run
        self.chosen: dict[str, Any] = {}
        self.taken: dict[str, Taken] = {}
        self.notes: dict[str, str] = {}
        self.mistakes: dict[str, str] = {}
        for key, text in given.items():
            try:
                self._take(key, text.strip() if isinstance(text, str) else text)
            except UserError as error:
                self.mistakes[key] = str(error)

    @property
    def foreign(self) -> set[str]:
        """The settings that were given in others' words."""
        return {name for name, taken in self.taken.items() if not taken.own}

    def _take(self, key: str, text: Any) -> None:
        own = aliases().get(key)
        row = other_launchers.find(key, own, SECTIONS, all_settings())
        leaf = key.rpartition(".")[2]
        if leaf in RETIRED and not own and (self.of_run or not row):
            self._pass_over(leaf, text)
            return
        gone = RETIRED.keys() - all_settings().keys()
        if row and gone.intersection(row.settings):
            self.notes[key] = (
                f"{leaf}={text} changes nothing here: {RETIRED[row.settings[0]].instead}"
            )
            return
        text = self._without_retired_values(own, text)
        if not own and not row:
            # The suggestion looks past a wrong section; the setting does not.
            hint = near_name(
                key.split(".")[-1], ["config", *all_settings()], "training.py --help lists them"
            )
            raise UserError(f"{key}: there is no such setting ({self.where}); {hint}")
        meant = (
            other_launchers.meaning(row, key, text, self.given)
            if row
            else other_launchers.Meaning({str(own): text})
        )
        if meant.note:
            self.notes[key] = meant.note
        for place, (name, given) in enumerate(meant.settings.items()):
            value = read_field(name, all_settings()[name][1], given, f" ({self.where})")
            self._set(name, value, Taken(key, bool(own), weak=not own and (place > 0 or meant.off)))

    def _pass_over(self, name: str, text: Any) -> None:
        """Notes that the retired setting `name` of an earlier run is ignored. Raises UserError where a user gave it."""
        usual, instead = RETIRED[name]
        if not self.of_run:
            raise UserError(f"{name}: no longer a setting ({self.where}); {instead}")
        value = shown(text) if isinstance(text, list) else "" if text is None else str(text)
        if value != usual:
            self.notes[name] = f"{name}={value} is no longer a setting and ignored; {instead}"

    def _without_retired_values(self, name: str | None, text: Any) -> Any:
        """The same for the values of the setting `name`: what is left of `text`."""
        if name not in {setting for setting, _ in RETIRED_VALUES}:
            return text
        values = text if isinstance(text, list) else str(text).split(",")
        choices = all_settings()[str(name)][1].metadata["bounds"].choices
        left = []
        for value in values:
            instead = RETIRED_VALUES.get((name, str(value).strip().lower()))
            if not instead or value in choices:
                left.append(value)
            elif self.of_run:
                self.notes[str(name)] = f"{name}={value} is no longer there; {instead}"
            else:
                raise UserError(f"{name}={value}: no longer there ({self.where}); {instead}")
        return left if len(left) < len(values) else text

    def _set(self, name: str, value: Any, now: Taken) -> None:
        before, there = self.taken.get(name), self.chosen.get(name)
        agree = (
            value == there
            or isinstance(value, list)
            and isinstance(there, list)
            and set(value) <= set(there)
        )
        if before and (before.own and now.own or not agree and before.weak == now.weak):
            raise UserError(
                f"{name}: given twice {self.where} (as {before.key} and {now.key}); give it once"
            )
        if not before or before.weak or now.own and not agree:
            self.chosen[name], self.taken[name] = value, now
            now = before or now
        if not agree and now.key not in {taken.key for taken in self.taken.values()}:
            self.notes.pop(now.key, None)  # it gave way


def as_dict(settings: TrainConfig) -> dict[str, dict[str, Any]]:
    """The settings as plain nested dict, for YAML and for state.json."""

    def plain(value: Any) -> Any:
        return str(value) if isinstance(value, Duration) else value

    return {
        section: {name: plain(value) for name, value in vars(getattr(settings, section)).items()}
        for section in SECTIONS
    }


def as_yaml(settings: TrainConfig) -> str:
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
        "Words of other launchers work where they mean the same: docs/from-*.md.",
    ]
    for section, kind in SECTIONS.items():
        lines += [
            "",
            f"{section}: {' '.join(kind.__doc__.split())}",
            *help_lines(kind, other_launchers.synonyms()),
        ]
    return "\n".join(lines)
