"""A foreign config.json, read field by field: none is overlooked, what our model can't hold is refused by name.

forms.yaml holds the tables of all forms, and describes them.
"""

import dataclasses
from itertools import groupby
from pathlib import Path
from typing import Any, NoReturn

import yaml

from config.model_config import Layer, ModelConfig, checked_model
from config.presets import PRESETS
from mamba_fsdp.errors import UserError
from mamba_fsdp.storage import read_object

Table = dict[str, Any]  # see forms.yaml

TABLES: Table = yaml.load(
    Path(__file__).with_name("forms.yaml").read_text(encoding="utf-8"),
    getattr(yaml, "CSafeLoader", yaml.SafeLoader),
)
TYPES: dict[str, Any] = {leaf.name: leaf.type for leaf in dataclasses.fields(ModelConfig)}
AUTO = ("dt_rank", "time_step_rank")  # fields in which "auto" stands for the default
UNLIMITED = (
    None,
    [0.0, float("inf")],
    [0.0, "inf"],
    [0.0, {"__float__": "Infinity"}],
)  # the last of transformers 5
INERT: tuple = (
    None,
    False,
    0,
    "",
    [],
    {},
)  # a field that says no to something we don't know of changes nothing


class Fields:
    """The fields of one config.json (or of an object inside it). `finish` sees to it that each is dealt with."""

    def __init__(self, path: Path, content: Any, prefix: str = ""):
        if not isinstance(content, dict):
            raise UserError(f"{path}: {prefix or 'the file'} is no JSON object")
        self.path, self.content, self.prefix = path, dict(content), prefix

    @classmethod
    def read(cls, path: Path) -> "Fields":
        return cls(path, read_object(path, {}, "copy or download it again"))

    def __contains__(self, name: str) -> bool:
        return name in self.content

    def take(self, name: str, *default: Any, kind: type = int) -> Any:
        """A field's value, of type `kind`; whole numbers at least 1, or 0 where that is the default. Absent or null:
        its default, if any."""
        value: Any = self.content.pop(name, None)
        if value is None or value == "auto" and name in AUTO:
            return default[0] if default else self.refuse(name, "is missing")
        if kind is float and type(value) is int:
            value = float(value)
        if type(value) is not kind:
            self.refuse(name, f"is {value!r}, not {kind.__name__}")
        least = 0 if default == (0,) else 1
        if type(value) is int and value < least:
            self.refuse(name, f"is {value}, but has to be at least {least}")
        return value

    def take_settings(self, table: Table) -> dict[str, Any]:
        """{our setting: value} for each field of the table."""
        return {
            ours: self.take(theirs, *default, kind=TYPES[ours])
            for theirs, (ours, *default) in table.items()
        }

    def check_limit(self, name: str) -> None:
        """Refuse limits of dt other than none."""
        value = self.content.pop(name, None)
        if value not in UNLIMITED:
            self.refuse(name, f"is {value}; only [0, inf], no limit, can be brought over")

    def expect(self, table: Table) -> None:
        """Refuse fields whose value (its library's default where absent) our model does not have."""
        for name, (wanted, default, *why) in table.items():
            value = self.content.pop(name, None)
            if (default if value is None else value) != wanted:
                reason = why[0] if why else "which this model does not have"
                self.refuse(name, f"is {value!r}, {reason}; only {wanted!r} can be brought over")

    def inner(self, name: str) -> "Fields":
        """An object inside as Fields of its own; empty where absent."""
        return Fields(self.path, self.content.pop(name, None) or {}, f"{self.prefix}{name}.")

    def ignore(self, *names: str) -> None:
        for name in names:
            self.content.pop(name, None)

    def refuse(self, name: str, problem: str) -> NoReturn:
        raise UserError(f"{self.path}: {self.prefix}{name} {problem}")

    def finish(self) -> None:
        for name, value in self.content.items():
            if value not in INERT:
                self.refuse(
                    name,
                    f"is {value!r}, a field that this program does not know; if the model's results "
                    "don't depend on it, remove it from the file",
                )


def write_fields(config: ModelConfig, table: Table, fixed: Table) -> dict[str, Any]:
    """{their field: value} for each field of the tables; 0 for "as the others say" becomes what they say."""
    return {
        theirs: getattr(config, f"resolved_{ours}", getattr(config, ours))
        for theirs, (ours, *_) in table.items()
    } | {name: wanted for name, (wanted, *_) in fixed.items()}


def model_config(path: Path, **values: Any) -> ModelConfig:
    """The checked ModelConfig of these values, written as a preset writes it where it is one. Raises UserError."""
    config = checked_model(path, values)
    presets = (
        ModelConfig(**preset, model_name=name, chunk_size=config.chunk_size)
        for name, preset in PRESETS.items()
    )
    return next((known for known in presets if known.structure() == config.structure()), config)


def pattern(layers: list[Layer]) -> str:
    """The text of ModelConfig.layers for a list of layers: its shortest period, runs with a count."""
    period = next(
        p
        for p in range(1, len(layers) + 1)
        if all(layer == layers[i % p] for i, layer in enumerate(layers))
    )
    names = (layer.mixer + "+mlp" * layer.mlp for layer in layers[:period])
    runs = [(name, len(list(run))) for name, run in groupby(names)]
    return ",".join(f"{count}*{name}" if count > 1 else name for name, count in runs)
