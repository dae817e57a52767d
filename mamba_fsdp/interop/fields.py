"""A foreign config.json, read field by field: none is overlooked, what our model can't hold is refused by name."""

import json
from pathlib import Path

from config.model_config import ModelConfig, checked_model
from config.presets import PRESETS
from mamba_fsdp.errors import UserError

INERT: tuple = (None, False, 0, "", [], {})  # a field that says no to something we don't know of changes nothing


class Fields:
    """The fields of one config.json (or of an object inside it). `finish` sees to it that each is dealt with."""

    def __init__(self, path, content, prefix=""):
        if not isinstance(content, dict):
            raise UserError(f"{path}: {prefix or 'the file'} is no JSON object")
        self.path, self.content, self.prefix = path, dict(content), prefix

    @classmethod
    def read(cls, path):
        try:
            return cls(path, json.loads(Path(path).read_bytes()))
        except OSError as error:
            raise UserError(f"can't read {path}: {error.strerror}") from None
        except ValueError as error:
            raise UserError(f"{path}: no valid JSON ({error})") from None

    def __contains__(self, name):
        return name in self.content

    def take(self, name, *default, kind=int, least=1):
        """A field's value, of type `kind`, whole numbers at least `least`. Absent or null: its default, if any."""
        value = self.content.pop(name, None)
        if value is None:
            return default[0] if default else self.refuse(name, "is missing")
        if kind is float and type(value) is int:
            value = float(value)
        if type(value) is not kind:
            self.refuse(name, f"is {value!r}, not {kind.__name__}")
        if kind is int and value < least:
            self.refuse(name, f"is {value}, but has to be at least {least}")
        return value

    def take_dt_rank(self, name):
        """The rank of Mamba-1's dt, 0 for "auto"."""
        if self.content.get(name) == "auto":
            del self.content[name]
        return self.take(name, 0, least=0)

    def refuse_limit(self, name):
        """Refuse limits of dt other than [0, infinity], which transformers 5 writes as {"__float__": "Infinity"}."""
        value = self.content.pop(name, None) or [0.0, "inf"]
        try:
            numbers = [float(limit["__float__"] if isinstance(limit, dict) else limit) for limit in value]
        except (TypeError, ValueError, KeyError):
            numbers = None
        if numbers != [0.0, float("inf")]:
            self.refuse(name, f"is {value}; only [0, inf], no limit, can be brought over")

    def expect(self, name, wanted, default, why="which this model does not have"):
        """Refuse a field whose value (its library's `default` where absent) is not `wanted`."""
        value = self.content.pop(name, None)
        if (default if value is None else value) != wanted:
            self.refuse(name, f"is {value!r}, {why}; only {wanted!r} can be brought over")

    def inner(self, name):
        """An object inside as Fields of its own; empty where absent."""
        return Fields(self.path, self.content.pop(name, None) or {}, f"{self.prefix}{name}.")

    def ignore(self, *names):
        for name in names:
            self.content.pop(name, None)

    def refuse(self, name, problem):
        raise UserError(f"{self.path}: {self.prefix}{name} {problem}")

    def finish(self):
        for name, value in self.content.items():
            if value not in INERT:
                self.refuse(name, f"is {value!r}, a field that this program does not know; if the model's results "
                                  "don't depend on it, remove it from the file")


def model_config(path, **values):
    """The checked ModelConfig of these values, written as a preset writes it where it is one. Raises UserError."""
    config = checked_model(path, values)
    for name, preset in PRESETS.items():
        known = ModelConfig(**preset, model_name=name, chunk_size=config.chunk_size)
        if config.structure() == known.structure():
            return known
    return config


def pattern(layers):
    """A list of Layer as the text of ModelConfig.layers: its shortest period, runs with a count."""
    period = next(p for p in range(1, len(layers) + 1) if all(layer == layers[i % p] for i, layer in enumerate(layers)))
    runs = []
    for layer in layers[:period]:
        name = layer.mixer + "+mlp" * layer.mlp
        if runs and runs[-1][1] == name:
            runs[-1][0] += 1
        else:
            runs.append([1, name])
    return ",".join(f"{count}*{name}" if count > 1 else name for count, name in runs)
