"""From the command line, a YAML file, a preset and the defaults to one checked TrainConfig; the help page; the YAML
form.

Order of precedence: command line, then --config FILE.yaml, then the preset that model_name names, then the defaults.
Every value is read by the type of its field, never guessed: a run id 0123 stays text.
"""

import ast
import dataclasses
import difflib
import inspect
import math
import textwrap
from functools import lru_cache
from pathlib import Path

from config.fields import whole_number
from config.presets import preset
from config.train_config import Duration, TrainConfig
from mamba_fsdp.errors import UserError

BOOLEANS = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}
PRECISIONS = {"true": "bf16", "false": "fp32"}  # launchers elsewhere have mixed_precision as a switch


@lru_cache(maxsize=None)
def all_settings():
    """dict: leaf name -> (section name, dataclass field)."""
    found = {}
    for section in dataclasses.fields(TrainConfig):
        for leaf in dataclasses.fields(section.default_factory):
            assert leaf.name not in found, f"two settings are called {leaf.name}"
            found[leaf.name] = (section.name, leaf)
    sections = {section.name for section in dataclasses.fields(TrainConfig)}
    assert not found.keys() & sections, "a setting is called like a section"
    return found


@lru_cache(maxsize=None)
def aliases():
    """dict: any accepted name -> leaf name."""
    names = {}
    for name, (section, leaf) in all_settings().items():
        for known in (name, *leaf.metadata["aliases"]):
            names[known] = names[f"{section}.{known}"] = name
    return names


def resolve_settings(given, config_file=None, stray=()):
    """The TrainConfig for the settings `given` (dict of name -> text) on top of `config_file`, the preset and the
    defaults.

    Returns (config, explicit): explicit is the set of leaf names that the command line or the file set. What only the
    command line has made pointless in the file is forgotten. Raises UserError for unknown names (with the nearest),
    values of the wrong type or out of bounds, settings that do nothing, impossible combinations, and `stray` words,
    which name no setting.
    """
    if stray:
        raise UserError(f"{stray[0]}: settings are written --name=value")
    in_file, on_line = {}, _read(given, "on the command line")
    if config_file:
        path = find_config_file(config_file)
        in_file = _read(flatten(load_yaml(path), path), f"in {path}")
    chosen = {**in_file, **on_line}
    config = _build(chosen)
    config.check()
    for name, sentence in _pointless(config, chosen, _usual(chosen)).items():
        if config.checkpoint.init_from and name in vars(config.model):
            continue  # the weights will tell the layers: see take_model
        if name in on_line:
            raise UserError(f"{sentence} (on the command line)")
        if name in _pointless(_build(in_file), in_file, _usual(in_file)):
            raise UserError(f"{sentence} (in {path})")
        del chosen[name]
    return _build(chosen), set(chosen)


def _build(chosen):
    """The TrainConfig of these values on top of the preset and the defaults."""
    config = TrainConfig()
    for name, value in {**_usual(chosen), **chosen}.items():
        setattr(getattr(config, all_settings()[name][0]), name, value)
    return config


def _usual(chosen):
    """dict: what every setting would be that is not chosen."""
    name = chosen.get("model_name", default("model_name"))
    return {**{name: default(name) for name in all_settings()}, **preset(name)}


def _pointless(config, names, usual):
    """dict: those of the settings `names` that do nothing in `config` -> a sentence that says so. To give what is
    usual (name -> value) is no mistake."""
    found = {}
    for name in names:
        section, leaf = all_settings()[name]
        value = getattr(getattr(config, section), name)
        if value != usual[name] and not _works(name, config):
            found[name] = f"{name}={shown(value)} does nothing without {leaf.metadata['needs'].words}; leave it out"
    return found


def _works(name, config):
    """Whether setting `name` has an effect in `config`."""
    needs = all_settings()[name][1].metadata["needs"]
    return needs is None or bool(needs.met(config))


def take_model(config, model, explicit):
    """Give `config` the shape of the weights that init_from names, a ModelConfig. Model settings that the user gave
    must agree with it.

    Raises UserError naming those that don't, and those that do nothing.
    """
    there = vars(model)
    if "model_name" not in explicit:
        for name in there.keys() - explicit:
            setattr(config.model, name, there[name])
    refuse_other_model(config, model, f"init_from {config.checkpoint.init_from}")
    for sentence in _pointless(config, there.keys() & explicit, there).values():
        raise UserError(sentence)


def refuse_other_model(config, model, source):
    """Raises UserError, naming the settings, where the ModelConfig `model` of the weights in `source` is not that of
    `config`."""
    differing = [f"{name}={now} (there {there})" for name, (now, there) in differing_model(config, model).items()]
    if differing:
        raise UserError(f"{source} holds another model than the settings ask for: {', '.join(differing)}")


def differing_model(config, model):
    """dict: setting -> (its value in `config`, that in the ModelConfig `model`), as written, of those that make another
    model of it. Empty for the same model, however it is described; what has no effect in `config` does not count."""
    now, there = config.model.structure(), model.structure()
    written = {name: (shown(getattr(config.model, name)), shown(getattr(model, name))) for name in there}
    return {name: (ours, theirs) for name, (ours, theirs) in written.items()
            if now[name] != there[name] and ours != theirs and _works(name, config)}


def default(name):
    section, leaf = all_settings()[name]
    return leaf.default if leaf.default is not dataclasses.MISSING else leaf.default_factory()


def find_config_file(name):
    """The path of a YAML file given as a path or as the name of one in config/. Raises UserError."""
    beside = Path(__file__).parent / f"{name}.yaml"
    for path in (Path(name), beside):
        if path.is_file():
            return path
    ready = ", ".join(sorted(path.stem for path in Path(__file__).parent.glob("*.yaml")))
    raise UserError(f"config: there is no file {name}; give a path or one of {ready}")


def load_yaml(path):
    import yaml

    class Text(yaml.SafeLoader):
        """Leaves every scalar as the text that was written, so that our own types decide; refuses a name given
        twice."""

        def construct_mapping(self, node, deep=False):
            content = super().construct_mapping(node, deep)
            if len(content) < len(node.value):
                names = [key.value for key, _ in node.value]
                raise yaml.YAMLError(f"{max(names, key=names.count)} is given twice")
            return content

    Text.yaml_implicit_resolvers = {}
    try:
        content = yaml.load(Path(path).read_text(), Loader=Text)
    except (yaml.YAMLError, UnicodeDecodeError, OSError) as error:
        raise UserError(f"{path}: can't be read as YAML: {' '.join(str(error).split())}") from None
    if content in (None, ""):
        return {}
    if not isinstance(content, dict):
        raise UserError(f"{path}: expected `name: value` lines")
    return content


def flatten(content, path):
    """{section: {name: value}} or {name: value} or both -> {name or section.name: value}."""
    sections = {field.name for field in dataclasses.fields(TrainConfig)}
    flat = {}
    for key, value in content.items():
        if key not in sections:
            flat[key] = value
        elif isinstance(value, dict):
            flat.update({f"{key}.{name}": inner for name, inner in value.items()})
        elif value:
            raise UserError(f"{path}: {key} is a section; put its settings below it")
    return flat


def _read(given, where):
    chosen = {}
    for key, text in given.items():
        name = aliases().get(key)
        if name is None:
            # A section that is given wrongly is forgiven in the suggestion, not in the setting.
            near = difflib.get_close_matches(key.split(".")[-1], ["config", *all_settings()], n=1, cutoff=0.5)
            hint = f"did you mean {near[0]}?" if near else "training.py --help lists them"
            raise UserError(f"{key}: there is no such setting ({where}); {hint}")
        if name in chosen:
            raise UserError(f"{name}: given twice {where} (as {key} too); give it once")
        chosen[name] = coerce(name, text, where)
    return chosen


def coerce(name, text, where):
    """The value of setting `name` written as `text` (or a YAML list of texts), of its type and within its bounds."""
    leaf = all_settings()[name][1]
    try:
        value = _convert(leaf.type, text, name)
    except ValueError as error:
        raise UserError(f"{name}={text}: {error} ({where})") from None
    bounds = leaf.metadata
    number = value.count if isinstance(value, Duration) else value
    if bounds["choices"] and value not in bounds["choices"]:
        raise UserError(f"{name}={text}: must be one of {', '.join(bounds['choices'])} ({where})")
    for holds, words in ((bounds["above"] is None or number > bounds["above"], f"above {bounds['above']}"),
                         (bounds["at_least"] is None or number >= bounds["at_least"], f"at least {bounds['at_least']}"),
                         (bounds["at_most"] is None or number <= bounds["at_most"], f"at most {bounds['at_most']}")):
        if not holds:
            raise UserError(f"{name}={text}: must be {words} ({where})")
    return value


def _convert(kind, text, name):
    if kind in (list[str], list[float]):
        parts = text if isinstance(text, list) else [part.strip() for part in str(text).strip("[]() ").split(",")]
        inner = str if kind == list[str] else float
        return [_convert(inner, part, name) for part in parts if part not in ("", None)]
    if isinstance(text, (list, dict)):
        raise ValueError("expected one value")
    text = "" if text is None else str(text).strip()
    if name == "mixed_precision":
        return PRECISIONS.get(text.lower(), text)
    if kind is str:
        if not text and default(name):
            raise ValueError("expected some text")
        return text
    if kind is Duration:
        return Duration.parse(text)
    if kind is int:
        return whole_number(text)
    if kind is bool:
        if text.lower() not in BOOLEANS:
            raise ValueError("expected true or false")
        return BOOLEANS[text.lower()]
    try:
        number = float(text)
    except ValueError:
        raise ValueError("expected a number") from None
    if not math.isfinite(number):
        raise ValueError("expected a finite number")
    return number


def as_dict(config):
    """The settings as plain nested dict, for YAML and for state.json."""
    def plain(value):
        return str(value) if isinstance(value, Duration) else value

    return {section.name: {name: plain(value) for name, value in vars(getattr(config, section.name)).items()}
            for section in dataclasses.fields(config)}


def as_yaml(config):
    import yaml

    return yaml.safe_dump(as_dict(config), sort_keys=False)


@lru_cache(maxsize=None)
def meanings(section):
    """dict: field name -> the string written below it in the dataclass `section`."""
    body = ast.parse(textwrap.dedent(inspect.getsource(section))).body[0].body
    return {above.target.id: " ".join(below.value.value.split()) for above, below in zip(body, body[1:])
            if isinstance(above, ast.AnnAssign) and isinstance(below, ast.Expr)}


def help_page():
    """Every setting with its type, bounds, default, meaning and other names."""
    lines = ["Train a Mamba language model. Going on after a stop or a crash is the same command again.", "",
             "  python training.py [--config=FILE.yaml] [--SETTING=VALUE ...]", "",
             "A setting may carry its section (--optimizer.learning_rate) and stand in YAML, flat or in sections.",
             "The command line wins over --config, that over the preset named by model_name, that over the defaults."]
    for section in dataclasses.fields(TrainConfig):
        kind = section.default_factory
        lines += ["", f"{section.name}: {' '.join(kind.__doc__.split())}"]
        for leaf in dataclasses.fields(kind):
            lines.append(f"  --{leaf.name}={shown(default(leaf.name))}  ({_bounds(leaf)})")
            also = f" Also: {', '.join(leaf.metadata['aliases'])}." if leaf.metadata["aliases"] else ""
            lines += textwrap.wrap(meanings(kind)[leaf.name] + also, 116, initial_indent=" " * 6,
                                   subsequent_indent=" " * 6)
    return "\n".join(lines)


def shown(value):
    """A value as it is written on the command line."""
    if isinstance(value, list):
        return ",".join(map(str, value))
    return str(value).lower() if isinstance(value, bool) else str(value)


def _bounds(leaf):
    if leaf.metadata["choices"]:
        return "|".join(leaf.metadata["choices"])
    kind = {int: "whole number", float: "number", str: "text", bool: "true|false", Duration: "steps or tokens",
            list[str]: "names", list[float]: "numbers"}[leaf.type]
    limits = [f"{key.replace('_', ' ')} {leaf.metadata[key]}" for key in ("above", "at_least", "at_most")
              if leaf.metadata[key] is not None]
    return ", ".join([kind, *limits])
