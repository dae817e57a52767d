"""Reads a config.json of another library field by field: no field is overlooked, and a field that our model can't
represent is refused by name. translations.yaml has the tables, and describes them.
"""

import contextlib
import dataclasses
from collections.abc import Mapping
from itertools import groupby
from pathlib import Path
from typing import Any, NoReturn

import yaml

from mamba_fsdp.errors import UserError
from mamba_fsdp.fields import Bounds
from mamba_fsdp.model.config import Layer, ModelConfig, parse_model_config
from mamba_fsdp.model.presets import PRESETS
from mamba_fsdp.storage.retry import read_text
from mamba_fsdp.storage.typed_json import read_object

Table = dict[str, Any]  # an object of YAML or JSON

TABLES: Table = yaml.safe_load(read_text(Path(__file__).with_name("translations.yaml")))
SETTINGS = {leaf.name: leaf for leaf in dataclasses.fields(ModelConfig)}
REQUIRED: Any = object()
AUTO = (
    "dt_rank",
    "time_step_rank",
    "mamba_d_head",
)  # fields in which "auto" stands for the default
# dt is computed in float32: no value of it is above this, the largest one, with the digits that people write of it.
LARGEST_DT = 3.4e38
SAYS_NO: tuple[Any, ...] = (
    None,
    False,
    0,
    "",
    [],
    {},
)  # an unknown field with one of these values has no effect


class Fields:
    """The fields of one config.json, or of an object inside it. Readers pop fields; `finish` refuses the rest."""

    def __init__(self, path: Path, content: Any, prefix: str = ""):
        if not isinstance(content, dict):
            raise UserError(f"{path}: {prefix or 'the file'} is not a JSON object")
        self.path = path
        self.content = dict(content)
        self.prefix = prefix

    @classmethod
    def read(cls, path: Path) -> "Fields":
        return cls(path, read_object(path, dict[str, Any], "copy or download it again"))

    def pop(
        self,
        name: str,
        default: Any = REQUIRED,
        kind: Any = int,
        limits: Mapping[str, float] = {},
    ) -> Any:
        """Removes a field and returns its value, of type `kind`, or the default if it is absent or null.

        limits: of a number, by their names in LIMITS. Whole numbers have to be at least 1, or 0 if that is the default.
        """
        value: Any = self.content.pop(name, None)
        if value is None or (value == "auto" and name in AUTO):
            if default is REQUIRED:
                self.refuse(name, "is missing")
            return default
        if kind is float and type(value) is int:
            with contextlib.suppress(OverflowError):
                value = float(value)
        if type(value) is not kind:
            self.refuse(name, f"is {value!r}, not {kind.__name__}")
        if kind is int:
            limits = {"at_least": 0 if default == 0 else 1, **limits}
        try:
            Bounds(dict(limits), (), some_text=False).check(value)
        except ValueError as error:
            self.refuse(name, f"is {value!r}, but {error}")
        return value

    def pop_indices(self, name: str, count: int) -> list[int]:
        """Removes a list that names some of `count` layers, counted from 0, and returns it."""
        indices = self.pop(name, [], kind=list)
        outside = [index for index in indices if type(index) is not int or not 0 <= index < count]
        if outside:
            self.refuse(name, f"names layers {outside} of a model of {count}")
        return indices

    def pop_settings(self, table: Table) -> Table:
        """Removes the fields of the table and returns {our setting: value}."""
        values = {}
        for name, (setting, *default) in table.items():
            usual = default[0] if default else REQUIRED
            kind: Any = int
            limits = {}
            if setting in SETTINGS:
                kind = SETTINGS[setting].type
                limits = SETTINGS[setting].metadata["bounds"].limits
            values[setting] = self.pop(name, usual, kind, limits)
        return values

    def expect(self, table: Table) -> None:
        """Removes the fields of the table and refuses values that our model can't have; an absent field has its
        library's default."""
        for name, (wanted, default, *reason) in table.items():
            value = self.content.pop(name, None)
            meant = default if value is None else value
            if meant != wanted:
                meaning = reason[0] if reason else "which this model does not have"
                self.refuse(name, f"is {value!r}, {meaning}; only {wanted!r} can be converted")

    def expect_no_limit(self, name: str) -> None:
        """Removes a field that limits dt, and refuses any limit."""
        value = self.content.pop(name, None)
        if value is not None and not _is_no_limit(value):
            self.refuse(name, f"is {value}; only [0, inf], no limit, can be converted")

    def inner(self, name: str) -> "Fields":
        """Removes an object inside and returns its Fields, empty if it is absent."""
        return Fields(self.path, self.content.pop(name, None) or {}, f"{self.prefix}{name}.")

    def ignore(self, *names: str) -> None:
        """Removes fields that say nothing about what the model computes."""
        for name in names:
            self.content.pop(name, None)

    def refuse(self, name: str, problem: str) -> NoReturn:
        raise UserError(f"{self.path}: {self.prefix}{name} {problem}")

    def finish(self) -> None:
        """Refuses the fields that are left."""
        for name, value in self.content.items():
            if value not in SAYS_NO:
                self.refuse(
                    name,
                    f"is {value!r}, a field that this program does not know; if the model's results "
                    "don't depend on it, remove it from the file",
                )


def _is_no_limit(value: Any) -> bool:
    """Returns whether these are limits of dt that no dt reaches. JSON has no infinity, so that libraries write it in
    several ways."""
    try:
        low, high = value
        if isinstance(high, dict):  # as transformers 5 writes it
            high = high["__float__"]
        return float(low) <= 0 and float(high) >= LARGEST_DT
    except (TypeError, ValueError, KeyError, OverflowError):
        return False


def write_fields(config: ModelConfig, settings: Table, fixed: Table) -> Table:
    """Returns {their field: value} for each field of the tables. A setting of 0 that stands for a computed default
    becomes that default."""
    fields = {}
    for name, (setting, *_) in settings.items():
        fields[name] = getattr(config, f"resolved_{setting}", getattr(config, setting))
    for name, (wanted, *_) in fixed.items():
        fields[name] = wanted
    return fields


def model_config(path: Path, **values: Any) -> ModelConfig:
    """Returns the checked ModelConfig of these values, or the preset's own if it is the same model. Raises
    UserError."""
    config = parse_model_config(path, values)
    for name, preset in PRESETS.items():
        candidate = ModelConfig(**preset, model_name=name, chunk_size=config.chunk_size)
        is_as_wide = candidate.d_model == config.d_model  # this rules most of them out at once
        if is_as_wide and candidate.structure() == config.structure():
            return candidate
    return config


def pattern(layers: list[Layer]) -> str:
    """Returns the text of ModelConfig.layers for a list of layers: its shortest period, equal neighbours with a count."""
    names = [layer.name for layer in layers]
    length = 1
    while names[length:] != names[:-length]:
        length += 1
    runs = []
    for name, run in groupby(names[:length]):
        count = len(list(run))
        runs.append(f"{count}*{name}" if count > 1 else name)
    return ",".join(runs)
