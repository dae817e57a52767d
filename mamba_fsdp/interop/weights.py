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
from typing import Any

import torch

from config.model_config import ModelConfig, checked_model
from mamba_fsdp.checkpoint.folder import Reader, find_checkpoint, refuse_other_tensors
from mamba_fsdp.checkpoint.tensors import Tensors, open_tensors
from mamba_fsdp.errors import UserError, first_line
from mamba_fsdp.interop import state_spaces
from mamba_fsdp.interop.fields import Fields
from mamba_fsdp.interop.safetensors_files import INDEX, SINGLE, open_safetensors
from mamba_fsdp.interop.transformers_forms import Form, form_of, parts
from mamba_fsdp.model.spec import EMBEDDING, LM_HEAD, parameters
from mamba_fsdp.parallel.world import World
from mamba_fsdp.run_layout import CHECKPOINTS, COMMIT, CONSOLIDATED, MODEL_CONFIG, TOKENIZER

PICKLED = "pytorch_model.bin"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "merges.txt",
                   "special_tokens_map.json", "added_tokens.json", "chat_template.jinja")


def load_tokenizer(path: str | Path) -> Any:
    """The tokenizer in a folder that transformers wrote. Raises UserError."""
    from transformers import AutoTokenizer  # seconds of imports

    try:
        return AutoTokenizer.from_pretrained(path)
    except Exception as error:  # the libraries raise whatever a file runs into
        raise UserError(f"tokenizer {path}: can't be loaded ({first_line(error)})") from None


class Weights:
    """An open source of weights.

    names: of all parameters, without a tied lm_head.weight; seq_length: that of the training, None where unknown;
    form: that of transformers which the tensors have, None for ours. Raises UserError for tensors of another model.
    """

    def __init__(self, source: Path, config: ModelConfig, tensors: Tensors, form: Form | None = None, *,
                 tokenizer_path: Path | None = None, seq_length: int | None = None):
        self.source, self.config, self.tokenizer_path, self.seq_length = source, config, tokenizer_path, seq_length
        own = {name: [(name, parameter.shape)] for name, parameter in parameters(config).items()}
        self.tensors, self.parts = tensors, parts(form, config) if form else own
        self.names = list(own)
        self._check(*((form.top[LM_HEAD], form.top[EMBEDDING]) if form else (LM_HEAD, EMBEDDING)))

    def get(self, name: str) -> torch.Tensor:
        """One whole parameter on the CPU, in the type it is stored in."""
        name = EMBEDDING if name == LM_HEAD and self.config.tie_embeddings else name
        rows = [self.tensors.get(theirs, shape) for theirs, shape in self.parts[name]]
        return rows[0] if len(rows) == 1 else torch.cat(rows)

    def _check(self, head, embedding):
        # Older Llama files hold the rotary frequencies, which follow from the config.
        found = {name: shape for name, shape in self.tensors.shapes.items() if not name.endswith("rotary_emb.inv_freq")}
        if self.config.tie_embeddings and head in found and embedding in found:
            if not torch.equal(self.tensors.get(head), self.tensors.get(embedding)):
                raise UserError(f"{self.source}: {head} differs from {embedding}, but the config says that they are "
                                "one (tied embeddings)")
            del found[head]
        refuse_other_tensors(self.source, dict(chain.from_iterable(self.parts.values())), found)


def read_weights(source: str | Path) -> Weights:
    """Open the Weights that `source` (path) names. Raises UserError for none, or one our model can't hold."""
    path = Path(source)
    if not path.exists():
        on_hub = re.fullmatch(r"[\w.-]+/[\w.-]+", str(source))
        hint = f"; download a model of the Hugging Face hub first: hf download {source} --local-dir FOLDER"
        raise UserError(f"{source}: there is no such file or folder{hint if on_hub else ''}")
    if path.is_file():
        return _read_model(path.parent, path)
    if (path / COMMIT).is_file() or (path / CHECKPOINTS).is_dir():
        checkpoint = find_checkpoint(path, World.alone())
        settings = Reader(checkpoint).state["settings"]
        return Weights(checkpoint, checked_model(checkpoint, settings["model"]), open_tensors(checkpoint),
                       seq_length=settings["data"]["seq_length"],
                       tokenizer_path=_tokenizer_in(checkpoint.parent.parent / TOKENIZER))
    if not (path / MODEL_CONFIG).is_file():
        raise UserError(f"{path} holds no model: it is neither a run folder ({CHECKPOINTS}/) nor a checkpoint "
                        f"({COMMIT}), and has no {MODEL_CONFIG}")
    return _read_model(path)


def config_beside(path: str | Path) -> ModelConfig | None:
    """The ModelConfig that config.json beside the weights file `path` says, None where there is none. Raises UserError
    for one that our model can't hold."""
    file = Path(path).parent / MODEL_CONFIG
    return _read_config(Fields.read(file))[0] if file.is_file() else None


def _read_model(folder, file=None):
    """The model of the config.json in `folder`; its weights are in `file`, or in whichever file is there."""
    if not (folder / MODEL_CONFIG).is_file():
        raise UserError(f"{file}: there is no {MODEL_CONFIG} beside it, which says what model this is")
    safetensors = file is not None and file.suffix == ".safetensors"
    config, form, seq_length = _read_config(Fields.read(folder / MODEL_CONFIG), foreign=safetensors)
    names = (SINGLE, INDEX, PICKLED) if form else (CONSOLIDATED, PICKLED)
    files = [file] if file and not form else [folder / name for name in names if (folder / name).is_file()]
    if not files:
        raise UserError(f"{folder} has a {MODEL_CONFIG} but no weights beside it ({' or '.join(names)})")
    tensors = open_safetensors(folder) if files[0].name in (SINGLE, INDEX) else open_tensors(files[0])
    return Weights(folder if form else files[0], config, tensors, form, seq_length=seq_length,
                   tokenizer_path=_tokenizer_in(folder if form else folder / TOKENIZER, folder))


def _read_config(fields, foreign=False):
    """(ModelConfig, the form of transformers that it is in or None, seq_length or None)."""
    if foreign or "model_type" in fields or "architectures" in fields:
        form = form_of(fields)
        return form.read_config(fields), form, None
    if "layers" not in fields:
        return state_spaces.read_config(fields), None, None
    seq_length = fields.content.pop("seq_length", None)
    return checked_model(fields.path, fields.content), None, seq_length


def _tokenizer_in(*folders):
    return next((folder for folder in folders if any((folder / name).is_file() for name in TOKENIZER_FILES)), None)
