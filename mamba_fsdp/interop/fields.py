"""A foreign config.json, read field by field so that none is overlooked: what our model can't represent is refused by name."""

import dataclasses
import json
from pathlib import Path

from config.model_config import ModelConfig
from config.presets import PRESETS
from mamba_fsdp.errors import UserError

INERT = (None, False, 0, "", [], {})  # a field that says no to something we don't know of changes nothing


class Fields:
    """The fields of one config.json (or of an object inside it). Every one is taken, expected or ignored; `finish` sees to it."""

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

    def take(self, name, *default, kind=int):
        """The value of a field, of type `kind`. Without a default the field has to be there."""
        value = self.content.pop(name, *default) if name in self.content or default else self.refuse(name, "is missing")
        value = float(value) if kind is float and isinstance(value, int) else value
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            self.refuse(name, f"is {value!r}, not {kind.__name__}")
        return value

    def expect(self, name, wanted, default, why="which this model does not have"):
        """Refuse a field whose value (its library's `default` where absent) is not `wanted`."""
        value = self.content.pop(name, default)
        if value != wanted and not (value is None and default == wanted):
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
                self.refuse(name, f"is {value!r}, a field that this program does not know; if the model's results don't depend "
                                  "on it, remove it from the file")


def model_config(path, **values):
    """The ModelConfig of these values, checked; derived sizes are left to follow, as in the presets. Raises UserError."""
    if values.get("dt_rank") == -(-values["d_model"] // 16):
        values["dt_rank"] = 0
    if "n_head" in values:
        if values["rotary_dim"] == values["head_dim"]:
            values["rotary_dim"] = -1
        if values["head_dim"] * values["n_head"] == values["d_model"]:
            values["head_dim"] = 0
    config = ModelConfig(**values)
    for leaf in dataclasses.fields(ModelConfig):
        value, least, most = getattr(config, leaf.name), leaf.metadata["at_least"], leaf.metadata["at_most"]
        if (least is not None and value < least) or (most is not None and value > most):
            raise UserError(f"{path}: {leaf.name} would be {value}, out of this model's bounds ({least} to {most})")
    try:
        config.check()
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    config.model_name = next((name for name, preset in PRESETS.items() if _same_structure(config, ModelConfig(**preset))), "demo")
    return config


def _same_structure(one, other):
    """Whether two configs differ at most in how the rows of the embedding come about, and in what changes no result."""
    def structure(config):
        free = {"model_name", "vocab_size", "pad_vocab_size_multiple", "chunk_size", "layers"}
        return {name: value for name, value in vars(config).items() if name not in free}, config.layer_list(), config.padded_vocab_size
    return structure(one) == structure(other)


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
