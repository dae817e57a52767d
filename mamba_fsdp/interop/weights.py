"""A model's weights from whatever names one, under our names and read part by part.

    RUN                          a run folder: its newest checkpoint
    RUN/checkpoints/step_...     one checkpoint
    .../consolidated.00.pth      a state dict, or what a trainer saved it in (prior.py), config.json beside it
    a folder                     with config.json and: model*.safetensors or pytorch_model.bin (transformers),
                                 pytorch_model.bin (state-spaces), or consolidated.00.pth (ours)

Where there is no config.json, who asks has to say what model it is.

To find a source is to read what model it is and nothing of its weights; this comes before the ranks meet. To open it,
which all ranks do together, verifies a checkpoint and checks names and shapes of all tensors. Nothing is executed.
"""

import math
import re
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from pathlib import Path

import torch

from config.model_config import ModelConfig, checked_model
from config.presets import preset
from mamba_fsdp.checkpoint.folder import Reader, check_same_tensors, find_checkpoint
from mamba_fsdp.checkpoint.tensors import Tensors, open_tensors
from mamba_fsdp.data.tokenizer import check_tokenizer, identities_in
from mamba_fsdp.errors import UserError
from mamba_fsdp.interop import state_spaces
from mamba_fsdp.interop.fields import Fields
from mamba_fsdp.interop.prior import from_fms, guess, models_tensors
from mamba_fsdp.interop.safetensors_files import INDEX, SINGLE, open_safetensors
from mamba_fsdp.interop.transformers_forms import Form, form_of, parts
from mamba_fsdp.model.spec import EMBEDDING, LM_HEAD, parameters
from mamba_fsdp.parallel.model import Shard
from mamba_fsdp.parallel.world import World
from mamba_fsdp.run_layout import CHECKPOINTS, COMMIT, CONSOLIDATED, MODEL_CONFIG, TOKENIZER

PICKLED = "pytorch_model.bin"
SHARDS, THEIR_INDEX = ".distcp", ".metadata"  # of torch.distributed.checkpoint
CONVERSION = "python -m torch.distributed.checkpoint.format_utils dcp_to_torch {0} {0}.pth"
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
)


class Weights:
    """A source of weights, which has to be opened before it is read.

    open_tensors(world, shards): see `open`. form: that of transformers which the tensors have, None for ours.
    names: of all parameters, without a tied lm_head.weight. seq_length: that of the training, None where unknown.
    tokenizer: the identity that a checkpoint knows.
    """

    def __init__(
        self,
        config: ModelConfig,
        open_tensors: Callable[..., Tensors],
        form: Form | None = None,
        *,
        tokenizer_path: Path | None = None,
        tokenizer: str = "",
        seq_length: int | None = None,
    ):
        self.config, self.tokenizer_path, self.seq_length = config, tokenizer_path, seq_length
        self.tokenizer = tokenizer
        own = {name: [(name, parameter.shape)] for name, parameter in parameters(config).items()}
        self.parts, self.names, self.open_tensors = (
            parts(form, config) if form else own,
            list(own),
            open_tensors,
        )
        self.tied = (form.top[LM_HEAD], form.top[EMBEDDING]) if form else (LM_HEAD, EMBEDDING)

    def open(self, world: World, shards: Sequence[Shard] = ()) -> "Weights":
        """Called by all ranks. shards: for fill_parts; a checkpoint's verifying fills them. Raises UserError, on all
        ranks: not to be read, broken, tensors of another model."""
        self.tensors = self.open_tensors(world, shards)
        self.source = self.tensors.source
        world.on_rank0(self._check)  # which may have to compare two whole tensors
        return self

    def get(self, name: str) -> torch.Tensor:
        """One whole parameter on the CPU, in the type it is stored in."""
        name = EMBEDDING if name == LM_HEAD and self.config.tie_embeddings else name
        shape = parameters(self.config)[name].shape
        return self.slice(name, 0, math.prod(shape)).view(shape)

    def slice(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Elements [start, stop) of a flattened parameter on the CPU, in the type they are stored in."""
        found, low = [], 0
        for theirs, shape in self.parts[
            name
        ]:  # one below the other: one after the other when flattened
            high = low + math.prod(shape)
            if max(start, low) < min(stop, high):
                found.append(
                    self.tensors.slice(theirs, max(start, low) - low, min(stop, high) - low)
                )
            low = high
        return found[0] if len(found) == 1 else torch.cat(found)

    def tokenizer_identities(self) -> Iterator[str]:
        """Of the tokenizer whose tokens the model has learnt, as far as it is known: see data/tokenizer.py."""
        yield self.tokenizer
        yield from identities_in(self.tokenizer_path)

    def use_tokenizer(self, path: Path, allow_other: bool = False) -> None:
        """Take the tokenizer in the folder `path`. Raises UserError for none there, or for another than the model's."""
        folder = _tokenizer_in(path, path / TOKENIZER)
        if folder is None:
            raise UserError(
                f"tokenizer={path} is no folder with a tokenizer ({', '.join(TOKENIZER_FILES[:3])})"
            )
        if not allow_other:
            identity = next(identities_in(folder), "")
            check_tokenizer(folder, identity, self.source, self.tokenizer_identities())
        self.tokenizer_path = folder

    def _check(self):
        head, embedding = self.tied
        # Older Llama files hold the rotary frequencies, which follow from the config.
        found = {
            name: shape
            for name, shape in self.tensors.shapes.items()
            if not name.endswith("rotary_emb.inv_freq")
        }
        if self.config.tie_embeddings and head in found and embedding in found:
            if not torch.equal(self.tensors.get(head), self.tensors.get(embedding)):
                raise UserError(
                    f"{self.source}: {head} differs from {embedding}, but the config says that they are "
                    "one (tied embeddings)"
                )
            del found[head]
        check_same_tensors(self.source, dict(chain.from_iterable(self.parts.values())), found)


def read_weights(source: str | Path, *, verified: bool = False, model_name: str = "") -> Weights:
    """find_weights, opened by one process. model_name: the preset that it is where it does not say so itself."""
    model = ModelConfig(**preset(model_name)) if model_name else None
    return find_weights(source, model, verified=verified).open(World.alone())


def find_weights(
    source: str | Path, model: ModelConfig | None = None, *, verified: bool = False
) -> Weights:
    """The Weights that `source` (path) names, not yet open. model: what it is where it does not say so itself.
    verified: of a checkpoint, that it is known to be whole. Raises UserError for none, or one that our model can't
    hold."""
    path = Path(source)
    if not path.exists():
        on_hub = re.fullmatch(r"[\w.-]+/[\w.-]+", str(source))
        hint = f"; download a model of the Hugging Face hub first: hf download {source} --local-dir FOLDER"
        raise UserError(f"{source}: there is no such file or folder{hint if on_hub else ''}")
    if path.is_file():
        return _find_model(path.parent, path, model)
    if (path / COMMIT).is_file() or (path / CHECKPOINTS).is_dir():
        return _find_checkpoint(path, verified)
    if not (path / MODEL_CONFIG).is_file():
        _refuse_sharded(path)
        raise UserError(
            f"{path} holds no model: it is neither a run folder ({CHECKPOINTS}/) nor a checkpoint "
            f"({COMMIT}), and has no {MODEL_CONFIG}"
        )
    return _find_model(path)


def _refuse_sharded(folder):
    """Raises UserError for a folder of torch.distributed.checkpoint, or of such folders: their index is a pickle of
    classes, which can't be read without running what it names."""
    found = [*folder.glob(THEIR_INDEX), *folder.glob(f"*/{THEIR_INDEX}")]
    if found:
        newest = max(found, key=lambda file: file.stat().st_mtime).parent
        raise UserError(
            f"{newest} is a folder of torch.distributed.checkpoint, which only its own program reads. "
            f"Where you trust it, convert it with torch 2.3 or newer: {CONVERSION.format(newest)}"
        )


def _find_checkpoint(path, verified):
    """Of the newest checkpoint as far as state.json tells; which one is whole shows when it is opened."""
    checkpoint = find_checkpoint(path, World.alone(), report=lambda text: None, part="state")
    state = Reader(checkpoint).state
    settings, progress = state["settings"], state.get("progress", {})

    def open_whole(world, into):
        return open_tensors(
            checkpoint if verified else find_checkpoint(path, world, part="model", shards=into),
            world,
        )

    return Weights(
        checked_model(checkpoint, settings["model"]),
        open_whole,
        seq_length=settings["data"]["seq_length"],
        tokenizer_path=_tokenizer_in(checkpoint.parent.parent / TOKENIZER),
        tokenizer=str(progress.get("tokenizer", "")),
    )


def _find_model(folder, file=None, model=None):
    """The model of the config.json in `folder`, else `model`; its weights are in `file`, or in whichever is there."""
    config, form, seq_length, suffix = model, None, None, file.suffix if file else ""
    if (folder / MODEL_CONFIG).is_file():
        config, form, seq_length = _read_config(
            Fields.read(folder / MODEL_CONFIG), foreign=suffix == ".safetensors"
        )
    elif model is None:
        raise UserError(
            f"{file}: there is no {MODEL_CONFIG} beside it, which says what model this is; {_hint(file)}"
        )
    form = None if suffix in (".pth", ".pt") else form
    names = (SINGLE, INDEX, PICKLED) if form else (CONSOLIDATED, PICKLED)
    files = (
        [file]
        if file and not form
        else [folder / name for name in names if (folder / name).is_file()]
    )
    if not files:
        _refuse_sharded(folder)
        raise UserError(
            f"{folder} has a {MODEL_CONFIG} but no weights beside it ({' or '.join(names)})"
        )
    return Weights(
        config,
        lambda world, _: open_file(files[0], world, config),
        form,
        seq_length=seq_length,
        tokenizer_path=_tokenizer_in(folder if form else folder / TOKENIZER, folder),
    )


def open_file(path: Path, world: World, config: ModelConfig | None = None) -> Tensors:
    """The model's tensors in a file, under our names where they are fms' (config: see from_fms). Called by all ranks.
    Raises UserError."""
    if path.suffix == SHARDS:
        _refuse_sharded(path.parent)
    if (path.parent / COMMIT).is_file():
        raise UserError(
            f"{path} is the part of one rank; the checkpoint that it belongs to is {path.parent}"
        )
    of_safetensors = path.suffix == ".safetensors" or path.name == INDEX
    found = (
        world.on_all_ranks(lambda: open_safetensors(path))
        if of_safetensors
        else open_tensors(path, world)
    )
    return from_fms(models_tensors(found), config)


def _hint(path):
    config = guess(open_file(path, World.alone()))
    if config:
        return f"name it: model_name={config.model_name} has just its tensors"
    return f"name its preset, as in model_name=mamba-130m; python -m mamba_fsdp inspect {path} lists its tensors"


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
    return next(
        (
            folder
            for folder in folders
            if any((folder / name).is_file() for name in TOKENIZER_FILES)
        ),
        None,
    )
