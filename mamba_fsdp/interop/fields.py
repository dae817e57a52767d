"""Reads a config.json of another library field by field. Every field is either translated or an error, so that no field is
ignored by accident. The tables are in translations.yaml, which also describes them.
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
AUTO = ("dt_rank", "time_step_rank", "mamba_d_head")  # "auto" means the default in these fields
MAX_DT = 3.4e38  # the largest float32, rounded down; dt is computed in float32
# An unknown field with one of these values has no effect.
FALSY_VALUES: tuple[Any, ...] = (None, False, 0, "", [], {})


class Fields:
    """The fields of a config.json, or of an object inside it. Readers remove the fields that they know; `finish` raises
    UserError if a field is left."""

    def __init__(self, path: Path, content: Any, prefix: str = ""):
        if not isinstance(content, dict):
            raise UserError(f"{path}: {prefix or 'the file'} is not a JSON object; copy it again")
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
        """Removes a field and returns its value.

        default: returned if the field is absent or null, or "auto" for a name in AUTO. kind: the required type. limits: bounds
        of a number, see `mamba_fsdp.fields.setting`; whole numbers must be at least 1, or at least 0 if the default is 0.
        Raises UserError for a missing field without default, and for a value of another type or out of bounds.
        """
        value: Any = self.content.pop(name, None)
        if value is None or (value == "auto" and name in AUTO):
            if default is REQUIRED:
                self.refuse(name, "is missing; add the field, or copy the file again")
            return default
        if kind is float and type(value) is int:
            with contextlib.suppress(OverflowError):
                value = float(value)
        if type(value) is not kind:
            self.refuse(name, f"is {value!r}, not {kind.__name__}")
        if kind is int:
            limits = {"at_least": 0 if default == 0 else 1, **limits}
        try:
            Bounds(dict(limits), (), rejects_empty=False).check(value)
        except ValueError as error:
            self.refuse(name, f"is {value!r}, but {error}")
        return value

    def pop_indices(self, name: str, count: int) -> list[int]:
        """Removes a list of layer indices and returns it.

        count: the number of layers. Raises UserError for an index that is not in [0, count)."""
        indices = self.pop(name, [], kind=list)
        outside = [index for index in indices if type(index) is not int or not 0 <= index < count]
        if outside:
            self.refuse(name, f"lists layers {outside}, but the model has {count} layers")
        return indices

    def pop_settings(self, table: Table) -> Table:
        """Removes the fields in the table and returns {setting of this program: value}.

        table: {field: [setting, default]}; without the default, the field is required."""
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
        """Removes the fields in the table, and raises UserError if one has another value than the one that this program
        supports.

        table: {field: [supported value, default of the library, meaning of other values]}."""
        for name, (wanted, default, *reason) in table.items():
            value = self.content.pop(name, None)
            meant = default if value is None else value
            if meant != wanted:
                meaning = reason[0] if reason else "which this model does not have"
                self.refuse(name, f"is {value!r}, {meaning}; only {wanted!r} can be converted")

    def expect_no_limit(self, name: str) -> None:
        """Removes a field with limits of dt. Raises UserError unless the limits have no effect."""
        value = self.content.pop(name, None)
        if value is not None and not _is_no_limit(value):
            self.refuse(name, f"is {value}; only [0, inf], which means no limit, can be converted")

    def inner(self, name: str) -> "Fields":
        """Removes a field that contains an object. Returns the Fields of the object, without any fields if it is absent."""
        return Fields(self.path, self.content.pop(name, None) or {}, f"{self.prefix}{name}.")

    def ignore(self, *names: str) -> None:
        """Removes fields that do not affect the results of the model."""
        for name in names:
            self.content.pop(name, None)

    def refuse(self, name: str, problem: str) -> NoReturn:
        raise UserError(f"{self.path}: {self.prefix}{name} {problem}")

    def finish(self) -> None:
        """Raises UserError for a field that has not been removed, unless its value means that it has no effect."""
        for name, value in self.content.items():
            if value not in FALSY_VALUES:
                self.refuse(
                    name,
                    f"is {value!r}, a field that this program does not know; if the model's results "
                    "don't depend on it, remove it from the file",
                )


def _is_no_limit(value: Any) -> bool:
    """Returns whether every dt is within these limits. JSON can't represent infinity, so libraries write it in several
    ways."""
    try:
        low, high = value
        if isinstance(high, dict):  # the format of transformers 5
            high = high["__float__"]
        return float(low) <= 0 and float(high) >= MAX_DT
    except (TypeError, ValueError, KeyError, OverflowError):
        return False


def write_fields(config: ModelConfig, settings: Table, fixed: Table) -> Table:
    """Returns {field of the other library: value} for each field in the tables.

    settings: {field: [setting, ...]}. If the value 0 of a setting means a computed default, the field has the computed value.
    fixed: {field: [value, ...]}."""
    fields = {}
    for name, (setting, *_) in settings.items():
        fields[name] = getattr(config, f"resolved_{setting}", getattr(config, setting))
    for name, (wanted, *_) in fixed.items():
        fields[name] = wanted
    return fields


def lost_settings(config: ModelConfig, as_read: ModelConfig) -> list[str]:
    """Returns the settings of a model, as "name=value", that differ after it was written and read again."""
    structure = as_read.structure()
    return [
        f"{name}={getattr(config, name)}"
        for name, value in config.structure().items()
        if structure.get(name) != value
    ]


def model_config(path: Path, **values: Any) -> ModelConfig:
    """Returns the ModelConfig with these values, or the ModelConfig of a preset that describes the same model.

    path: the file with the values, for messages. Raises UserError if they do not describe a valid model."""
    config = parse_model_config(path, values)
    for name, preset in PRESETS.items():
        candidate = ModelConfig(**preset, model_name=name, chunk_size=config.chunk_size)
        is_as_wide = candidate.d_model == config.d_model  # a quick test that excludes most presets
        if is_as_wide and candidate.structure() == config.structure():
            return candidate
    return config


def pattern(layers: list[Layer]) -> str:
    """Formats a list of layers for ModelConfig.layers: the shortest period of the list, in which equal neighbours are written
    once with a count."""
    names = [layer.name for layer in layers]
    length = 1
    while names[length:] != names[:-length]:
        length += 1
    runs = []
    for name, run in groupby(names[:length]):
        count = len(list(run))
        runs.append(f"{count}*{name}" if count > 1 else name)
    return ",".join(runs)
