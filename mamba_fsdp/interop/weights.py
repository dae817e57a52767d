"""A model's weights from whatever names one, under our names and read part by part.

    RUN                          a run folder: its newest checkpoint
    RUN/checkpoints/step_...     one checkpoint
    .../consolidated.00.pth      a state dict, or what a trainer saved it in (fms_files.py), config.json beside it
    a folder                     with config.json and: model*.safetensors or pytorch_model.bin (transformers),
                                 pytorch_model.bin (state-spaces), or consolidated.00.pth (ours)

Where there is no config.json, who asks has to say what model it is.

To find a source is to read what model it is and nothing of its weights; this comes before the ranks meet. To open it,
which all ranks do together, verifies a checkpoint and checks names and shapes of all tensors. Nothing is executed.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate, chain
from pathlib import Path

import torch

from mamba_fsdp.checkpoint.contents import read_state
from mamba_fsdp.checkpoint.folder import check_same_tensors
from mamba_fsdp.checkpoint.ranges import overlaps
from mamba_fsdp.checkpoint.restore import find_checkpoint
from mamba_fsdp.checkpoint.tensors import Tensors, open_checkpoint
from mamba_fsdp.data.tokenizer import identities_in
from mamba_fsdp.errors import UserError
from mamba_fsdp.interop import state_spaces
from mamba_fsdp.interop.fields import Fields
from mamba_fsdp.interop.fms_files import find_model, from_fms
from mamba_fsdp.interop.places import check_place, refuse_dcp
from mamba_fsdp.interop.pth_files import open_pth
from mamba_fsdp.interop.safetensors_files import INDEX, SINGLE, open_safetensors
from mamba_fsdp.interop.transformers_layouts import Layout, layout_of
from mamba_fsdp.model.spec import EMBEDDING, LM_HEAD, parameters
from mamba_fsdp.parallel.world import World
from mamba_fsdp.run_layout import CHECKPOINTS, COMMIT, CONSOLIDATED, MODEL_CONFIG, TOKENIZER
from mamba_fsdp.settings.model_config import ModelConfig, checked_model
from mamba_fsdp.settings.presets import preset

PICKLED = "pytorch_model.bin"
OF_TRAINERS = (".pth", ".pt")  # files with our names or fms', whatever config.json lies beside them
DCP_PART = ".distcp"  # of torch.distributed.checkpoint
OLDER_LLAMA = "rotary_emb.inv_freq"  # in its files, though it follows from the config
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


@dataclass
class Description:
    """What a config.json says."""

    config: ModelConfig
    layout: Layout | None = None  # that of transformers, None for names as ours
    seq_length: int | None = None  # of the training, None where unknown


class Weights:
    """A source of weights, which has to be opened before it is read.

    shapes: of all parameters by name, without a tied lm_head.weight. tokenizer: the identity that a checkpoint knows.
    """

    def __init__(
        self,
        model: Description,
        open_tensors: Callable[[World], Tensors],
        tokenizer_path: Path | None,
        tokenizer: str = "",
    ):
        self.config = model.config
        self.seq_length = model.seq_length
        self.tokenizer_path = tokenizer_path
        self.tokenizer = tokenizer
        self.open_tensors = open_tensors
        spec = parameters(model.config)
        self.shapes = {name: parameter.shape for name, parameter in spec.items()}
        self.tied = (LM_HEAD, EMBEDDING)
        self.parts = {name: [(name, shape)] for name, shape in self.shapes.items()}  # see Layout
        self.swapped: tuple[str, ...] = ()  # ends of the names whose halves lie the other way round
        if model.layout:
            self.tied = (model.layout.top[LM_HEAD], model.layout.top[EMBEDDING])
            self.parts = model.layout.parts(model.config)
            self.swapped = tuple(model.layout.swapped)

    def open(self, world: World) -> "Weights":
        """Called by all ranks. Raises UserError on all: not to be read, broken, tensors of another model."""
        self.tensors = self.open_tensors(world)
        self.source = self.tensors.source
        world.on_rank0(self._check)  # which may have to compare two whole tensors
        return self

    def get(self, name: str) -> torch.Tensor:
        """Returns one whole parameter on the CPU, in the type it is stored in."""
        shape = self.shapes[name]
        return self.slice(name, 0, math.prod(shape)).view(shape)

    def slice(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Returns elements [start, stop) of a flattened parameter on the CPU, in the type they are stored in."""
        if name.endswith(self.swapped):
            size = math.prod(self.shapes[name])
            return self._stored(name, 0, size).roll(size // 2)[start:stop]
        return self._stored(name, start, stop)

    def _stored(self, name, start, stop):
        """Elements [start, stop) of a parameter as its parts are stored."""
        parts = self.parts[name]  # one below the other: one after the other when flattened
        *starts, size = accumulate([math.prod(shape) for _, shape in parts], initial=0)
        found = []
        for part in overlaps(start, stop, starts, size):
            stored, _ = parts[part.piece]
            found.append(self.tensors.slice(stored, part.offset, part.offset + part.count))
        return found[0] if len(found) == 1 else torch.cat(found)

    def tokenizer_identities(self) -> Iterator[str]:
        """Yields those of the tokenizer whose tokens the model has learnt, as far as known: see data/tokenizer.py."""
        yield self.tokenizer
        yield from identities_in(self.tokenizer_path)

    def use_tokenizer(self, path: Path) -> None:
        """Takes the tokenizer in the folder `path`. Raises UserError for none there."""
        folder = _tokenizer_in(path, path / TOKENIZER)
        if folder is None:
            names = ", ".join(TOKENIZER_FILES[:3])
            raise UserError(f"tokenizer={path} holds no tokenizer ({names})")
        self.tokenizer_path = folder

    def _check(self):
        shapes = self.tensors.shapes
        found = {name: shape for name, shape in shapes.items() if not name.endswith(OLDER_LLAMA)}
        head, embedding = self.tied
        if self.config.tie_embeddings and head in found and embedding in found:
            if not torch.equal(self.tensors.get(head), self.tensors.get(embedding)):
                raise UserError(
                    f"{self.source}: {head} differs from {embedding}, but the config says that they are "
                    "one (tied embeddings)"
                )
            del found[head]
        check_same_tensors(self.source, dict(chain(*self.parts.values())), found)


def read_weights(source: str | Path, *, model_name: str = "") -> Weights:
    """find_weights, opened by one process. model_name: the preset that it is where it does not say so itself."""
    model = ModelConfig(**preset(model_name)) if model_name else None
    return find_weights(source, model).open(World.alone())


def find_weights(source: str | Path, model: ModelConfig | None = None) -> Weights:
    """Returns the Weights that the path `source` names, not yet open.

    model: what it is where it does not say so itself. Raises UserError for none, or one that our model can't hold.
    """
    check_place(source)
    path = Path(source)
    if path.is_file():
        return _find_file(path, model)
    if (path / COMMIT).is_file() or (path / CHECKPOINTS).is_dir():
        return _find_checkpoint(path)
    return _find_in_folder(path, read_description(path / MODEL_CONFIG))


def _find_checkpoint(path):
    """Of the newest checkpoint as far as state.json tells; which one is whole shows when it is opened."""
    checkpoint = find_checkpoint(path, World.alone(), report=lambda text: None, part="state").path
    state = read_state(checkpoint).state
    config = checked_model(checkpoint, state["settings"]["model"])
    model = Description(config, seq_length=state["settings"]["data"]["seq_length"])
    tokenizer = str(state.get("progress", {}).get("tokenizer", ""))

    def open_whole(world):
        whole = find_checkpoint(path, world, part="model").path
        return open_checkpoint(whole, world)

    return Weights(
        model, open_whole, _tokenizer_in(checkpoint.parent.parent / TOKENIZER), tokenizer
    )


def _find_file(file, model):
    folder = file.parent
    if (folder / MODEL_CONFIG).is_file():
        description = read_description(folder / MODEL_CONFIG)
    elif model:
        description = Description(model)
    else:
        open_file(file, World.alone())  # what is wrong with it comes first
        raise UserError(
            f"{file}: there is no {MODEL_CONFIG} beside it, which says what model this is; name its preset, as in "
            f"model_name=mamba-130m; python -m mamba_fsdp inspect {file} lists its tensors"
        )
    if file.suffix in OF_TRAINERS:
        description.layout = None
    if description.layout:  # the file may be one of several
        return _find_in_folder(folder, description)
    return _from_file(file, description)


def _find_in_folder(folder, description):
    names = (SINGLE, INDEX, PICKLED) if description.layout else (CONSOLIDATED, PICKLED)
    for name in names:
        if (folder / name).is_file():
            return _from_file(folder / name, description)
    refuse_dcp(folder)
    raise UserError(
        f"{folder} has a {MODEL_CONFIG} but no weights beside it ({' or '.join(names)})"
    )


def _from_file(file, description):
    def open_it(world):
        return open_file(file, world, description.config)

    tokenizer_path = _tokenizer_in(file.parent / TOKENIZER, file.parent)
    return Weights(description, open_it, tokenizer_path)


def open_file(path: Path, world: World, config: ModelConfig | None = None) -> Tensors:
    """Returns the model's tensors in a file, under our names where they are fms' (config: see from_fms). Called by all
    ranks. Raises UserError."""
    if path.suffix == DCP_PART:
        refuse_dcp(path.parent)
    if (path.parent / COMMIT).is_file():
        raise UserError(
            f"{path} is one rank's part of a checkpoint; name the checkpoint instead: {path.parent}"
        )
    open_tensors = open_pth
    if path.suffix == ".safetensors" or path.name == INDEX:
        open_tensors = open_safetensors
    tensors = world.on_all_ranks(open_tensors, path)
    return from_fms(find_model(tensors), config)


def read_description(path: Path) -> Description:
    """Returns what a config.json says: one of ours, of state-spaces or of transformers. Raises UserError."""
    fields = Fields.read(path)
    if "model_type" in fields.content or "architectures" in fields.content:
        layout = layout_of(fields)
        return Description(layout.read_config(fields), layout)
    if "layers" not in fields.content:
        return Description(state_spaces.read_config(fields))
    seq_length = fields.content.pop("seq_length", None)
    return Description(checked_model(path, fields.content), seq_length=seq_length)


def _tokenizer_in(*folders):
    for folder in folders:
        if any((folder / name).is_file() for name in TOKENIZER_FILES):
            return folder
    return None
