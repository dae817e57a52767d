"""A model's weights from whatever names one, under our names and read one parameter at a time.

    RUN                          a run folder: its newest checkpoint
    RUN/checkpoints/step_...     one checkpoint
    .../consolidated.00.pth      a plain state dict, config.json beside it
    a folder                     with config.json and: model*.safetensors or pytorch_model.bin (transformers),
                                 pytorch_model.bin (state-spaces), or consolidated.00.pth (ours)

Opening checks names and shapes of all tensors; loading executes nothing.
"""

import re
from itertools import chain
from pathlib import Path

import torch

from config.model_config import checked_model
from mamba_fsdp.checkpoint.folder import find_checkpoint, read_state, refuse_other_tensors
from mamba_fsdp.checkpoint.tensors import open_tensors
from mamba_fsdp.errors import UserError, first_line
from mamba_fsdp.interop import state_spaces, transformers_forms
from mamba_fsdp.interop.fields import Fields
from mamba_fsdp.interop.safetensors_files import has_safetensors, open_safetensors
from mamba_fsdp.model.spec import EMBEDDING, LM_HEAD, parameters
from mamba_fsdp.parallel.world import World
from mamba_fsdp.run_layout import CHECKPOINTS, COMMIT, CONSOLIDATED, MODEL_CONFIG, TOKENIZER

PICKLED = "pytorch_model.bin"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "merges.txt",
                   "special_tokens_map.json", "added_tokens.json", "chat_template.jinja")


def load_tokenizer(path):
    """The tokenizer in a folder that transformers wrote. Raises UserError."""
    from transformers import AutoTokenizer  # seconds of imports

    try:
        return AutoTokenizer.from_pretrained(path)
    except Exception as error:  # the libraries raise whatever a file runs into
        raise UserError(f"tokenizer {path}: can't be loaded ({first_line(error)})") from None


class Weights:
    """An open source of weights.

    config: ModelConfig; names: every parameter, a tied lm_head.weight left out; tokenizer_path: folder or None;
    seq_length: that of the training, None where unknown.
    """

    def __init__(self, source, config, tensors, parts, *, tied=None, tokenizer_path=None, seq_length=None):
        """tensors: Tensors under their names; parts: {our name: [(their name, shape), ...]}; tied: their (lm_head,
        embedding)."""
        self.source, self.config, self.tokenizer_path, self.seq_length = source, config, tokenizer_path, seq_length
        self.tensors, self.parts = tensors, parts
        self.names = list(parts)
        self._check(tied)

    def get(self, name):
        """One whole parameter on the CPU, in the type it is stored in."""
        name = EMBEDDING if name == LM_HEAD and self.config.tie_embeddings else name
        rows = [self.tensors.get(theirs, shape) for theirs, shape in self.parts[name]]
        return rows[0] if len(rows) == 1 else torch.cat(rows)

    def _check(self, tied):
        wanted = dict(chain.from_iterable(self.parts.values()))
        # Older Llama files hold the rotary frequencies, which follow from the config.
        found = {name: shape for name, shape in self.tensors.shapes.items() if not name.endswith("rotary_emb.inv_freq")}
        if self.config.tie_embeddings and tied[0] in found and tied[1] in found:
            if not torch.equal(self.tensors.get(tied[0]), self.tensors.get(tied[1])):
                raise UserError(f"{self.source}: {tied[0]} differs from {tied[1]}, but the config says that they are "
                                "one (tied embeddings)")
            del found[tied[0]]
        refuse_other_tensors(self.source, wanted, found)


def read_weights(source):
    """Open the Weights that `source` (path) names. Raises UserError for none, or one our model can't hold."""
    path = Path(source)
    if not path.exists():
        hint = ""
        if re.fullmatch(r"[\w.-]+/[\w.-]+", str(source)):
            hint = f"; download a model of the Hugging Face hub first: hf download {source} --local-dir FOLDER"
        raise UserError(f"{source}: there is no such file or folder{hint}")
    if path.is_file():
        return _read_file(path)
    if (path / COMMIT).is_file() or (path / CHECKPOINTS).is_dir():
        return _read_checkpoint(find_checkpoint(path, World.alone()))
    if not (path / MODEL_CONFIG).is_file():
        raise UserError(f"{path} holds no model: it is neither a run folder ({CHECKPOINTS}/) nor a checkpoint "
                        f"({COMMIT}), and has no {MODEL_CONFIG}")
    if (path / CONSOLIDATED).is_file():
        return _read_file(path / CONSOLIDATED)
    fields = Fields.read(path / MODEL_CONFIG)
    if "model_type" in fields or "architectures" in fields:
        return _read_transformers(path, fields)
    if (path / PICKLED).is_file():
        return _read_file(path / PICKLED)
    raise UserError(f"{path} has a {MODEL_CONFIG} but no weights beside it ({CONSOLIDATED} or {PICKLED})")


def _read_file(path):
    """consolidated.00.pth or pytorch_model.bin under our names, config.json beside it in our form or state-spaces'."""
    folder = path.parent
    if not (folder / MODEL_CONFIG).is_file():
        raise UserError(f"{path}: there is no {MODEL_CONFIG} beside it, which says what model this is")
    fields = Fields.read(folder / MODEL_CONFIG)
    if path.suffix == ".safetensors" or "model_type" in fields:
        return _read_transformers(folder, fields)
    config, seq_length = _read_config(fields)
    return _ours(path, config, open_tensors(path), seq_length=seq_length,
                 tokenizer_path=_tokenizer_in(folder / TOKENIZER, folder))


def config_beside(path):
    """The ModelConfig that config.json beside the weights file `path` says, None where there is none. Raises UserError
    for one that our model can't hold."""
    file = Path(path).parent / MODEL_CONFIG
    if not file.is_file():
        return None
    fields = Fields.read(file)
    if "model_type" in fields or "architectures" in fields:
        return transformers_forms.read_config(transformers_forms.form_of(fields), fields)
    return _read_config(fields)[0]


def _read_config(fields):
    """(ModelConfig, seq_length or None) from our form or state-spaces'."""
    if "layers" not in fields:
        return state_spaces.read_config(fields), None
    seq_length = fields.content.pop("seq_length", None)
    return checked_model(fields.path, fields.content), seq_length


def _read_checkpoint(path):
    settings = read_state(path)["settings"]
    config = checked_model(path, settings["model"])
    tokenizer_path = _tokenizer_in(path.parent.parent / TOKENIZER)  # which the run keeps
    return _ours(path, config, open_tensors(path), seq_length=settings["data"]["seq_length"],
                 tokenizer_path=tokenizer_path)


def _read_transformers(folder, fields):
    form = transformers_forms.form_of(fields)
    config = transformers_forms.read_config(form, fields)
    if has_safetensors(folder):
        tensors = open_safetensors(folder)
    elif (folder / PICKLED).is_file():
        tensors = open_tensors(folder / PICKLED)
    else:
        raise UserError(f"{folder} has a {MODEL_CONFIG} but no weights beside it (model.safetensors, "
                        f"model.safetensors.index.json or {PICKLED})")
    return Weights(folder, config, tensors, transformers_forms.parts(form, config),
                   tied=(form.top[LM_HEAD], form.top[EMBEDDING]), tokenizer_path=_tokenizer_in(folder))


def _ours(source, config, tensors, **more):
    own = {name: [(name, parameter.shape)] for name, parameter in parameters(config).items()}
    return Weights(source, config, tensors, own, tied=(LM_HEAD, EMBEDDING), **more)


def _tokenizer_in(*folders):
    return next((folder for folder in folders if any((folder / name).is_file() for name in TOKENIZER_FILES)), None)
