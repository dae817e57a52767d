"""Reads the weights of a model, slice by slice, with the tensor names of this program. The path of a model is one of these:

    RUN                          a run folder: its newest checkpoint
    RUN/checkpoints/step_...     one checkpoint
    .../consolidated.00.pth      a state dict, or a checkpoint of a trainer that contains one (fms_files.py), with config.json
                                 next to it
    a folder                     with config.json and: model*.safetensors or pytorch_model.bin (transformers),
                                 pytorch_model.bin (state-spaces), consolidated.00.pth or model.safetensors (this program)

If there is no config.json, the caller has to describe the model.

Weights are found first and opened later. Finding them only reads the description of the model, on one rank, before the process
group exists. All ranks then open them together: this verifies a checkpoint, and checks the names and shapes of all tensors. No
code from the files is executed.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import accumulate, chain
from pathlib import Path

import torch

from mamba_fsdp.checkpoint.folder import check_same_tensors
from mamba_fsdp.checkpoint.ranges import find_overlaps
from mamba_fsdp.checkpoint.restore import (
    CheckpointCandidate,
    VerifiedCheckpoint,
    find_checkpoint,
    find_newest_checkpoint,
)
from mamba_fsdp.checkpoint.saved_run import SavedRun
from mamba_fsdp.checkpoint.tensors import CheckpointTensors, TensorSource
from mamba_fsdp.data.tokenizer import identities_in
from mamba_fsdp.errors import UserError, command
from mamba_fsdp.importing.kinds import tokenizer_path_in, unexpected_path_error
from mamba_fsdp.interop import state_spaces
from mamba_fsdp.interop.architectures import (
    Architecture,
    StoredTensor,
    architecture_of,
    silent_tensors,
)
from mamba_fsdp.interop.fields import Fields
from mamba_fsdp.interop.fms_files import FMS_EMBEDDINGS, FmsTensors
from mamba_fsdp.interop.places import check_model_path, refuse_dcp
from mamba_fsdp.interop.pth_files import PthTensors
from mamba_fsdp.interop.safetensors_files import INDEX, SINGLE, SafetensorsTensors
from mamba_fsdp.interop.silent_attention import without_silent_attention
from mamba_fsdp.model.config import ModelConfig, parse_model_config
from mamba_fsdp.model.presets import preset
from mamba_fsdp.model.spec import EMBEDDING, LM_HEAD, parameters
from mamba_fsdp.parallel.world import World
from mamba_fsdp.run.names import CHECKPOINTS, COMMIT, CONSOLIDATED, MODEL_CONFIG
from mamba_fsdp.storage.retry import is_file, is_folder

PICKLED = "pytorch_model.bin"
# Files with these suffixes have the tensor names of this program or of fms, even if config.json is from transformers.
TRAINER_SUFFIXES = (".pth", ".pt")
DCP_SUFFIX = ".distcp"  # files of torch.distributed.checkpoint
MTP_PREFIX = "mtp."  # names of layers for multi-token prediction begin with this
# Older files of Llama contain this tensor, although it follows from the config.
ROTARY_FREQUENCIES = "rotary_emb.inv_freq"


@dataclass
class Description:
    """The model that a config.json describes."""

    config: ModelConfig
    # The architecture in transformers; None if the tensors have the names of this program.
    architecture: Architecture | None = None
    seq_length: int | None = None  # the sequence length of the training; None if unknown


class Weights(TensorSource):
    """The weights of one model in any of the formats. They have to be opened before they are read.

    shapes: {name: shape} of all parameters, without a tied lm_head.weight. tokenizer: the identity of the tokenizer, if a
    checkpoint contains it.
    """

    def __init__(
        self,
        path: Path,
        model: Description,
        tokenizer_path: Path | None,
        tokenizer: str = "",
        found: CheckpointCandidate | None = None,
    ):
        """Does not read the weights yet.

        path: a file, a checkpoint or a run folder. found: the checkpoint, if `path` is a checkpoint or a run."""
        self.path = path
        self.found = found
        self.config = model.config
        self.seq_length = model.seq_length
        self.tokenizer_path = tokenizer_path
        self.tokenizer = tokenizer
        self.parameters = parameters(model.config)
        self.shapes = {name: parameter.shape for name, parameter in self.parameters.items()}
        self.stored = {name: [StoredTensor(name, shape)] for name, shape in self.shapes.items()}
        self.unread: set[str] = set()  # names of stored tensors that have no effect on the results
        self.aliases: dict[str, str] = {}  # see translations.yaml
        self.swapped: tuple[str, ...] = ()  # suffixes of names, see translations.yaml
        if model.architecture:
            self.stored = model.architecture.stored_tensors(model.config)
            self.unread = silent_tensors(model.architecture, model.config)
            self.swapped = tuple(model.architecture.swapped)
            self.aliases = model.architecture.aliases

    def open(
        self, world: World, use: "Callable[[Weights], object]" = lambda weights: None
    ) -> "Weights":
        """Opens the weights on all ranks together and returns them. Raises UserError on all ranks if they can't be
        read, are broken, or belong to another model.

        use: a function that each rank then calls with the weights. It must not communicate with other ranks.
        """
        whole = None
        if self.found:
            whole = find_checkpoint(self.path, world, only_model=True, found=self.found)

        def open_and_use() -> None:
            self._open(whole, world.rank)
            use(self)

        world.on_all_ranks(open_and_use)
        return self

    def _open(self, whole: VerifiedCheckpoint | None, rank: int) -> None:
        if whole:
            self.tensors: TensorSource = CheckpointTensors(whole)
        else:
            self.tensors = open_file(self.path, self.config)
        self.source = self.tensors.source
        self.stored = {name: self._in_file(stored) for name, stored in self.stored.items()}
        self._check(rank)

    def _in_file(self, stored: list[StoredTensor]) -> list[StoredTensor]:
        """Returns the tensors that make up a parameter, with their names and shapes in the file. These can differ from the
        expected names and shapes: transformers saves the three parts of the convolutions of Olmo Hybrid in equal sizes."""
        shapes = self.tensors.shapes
        for part, alias in self.aliases.items():
            renamed = [replace(tensor, name=tensor.name.replace(part, alias)) for tensor in stored]
            if renamed[0].name in shapes:
                stored = renamed
        if len(stored) == 1:
            return stored
        cut = [replace(tensor, shape=shapes.get(tensor.name, ())) for tensor in stored]
        whole = [sum(math.prod(tensor.shape) for tensor in parts) for parts in (cut, stored)]
        return cut if whole[0] == whole[1] else stored

    def slice(self, name: str, start: int, stop: int) -> torch.Tensor:
        if name.endswith(self.swapped):
            size = math.prod(self.shapes[name])
            return self._slice_stored(name, 0, size).roll(size // 2)[start:stop]
        return self._slice_stored(name, start, stop)

    def _slice_stored(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Returns the elements [start, stop) of the concatenated stored tensors that make up a parameter."""
        stored = self.stored[name]
        *starts, size = accumulate([math.prod(tensor.shape) for tensor in stored], initial=0)
        slices = []
        for overlap in find_overlaps(start, stop, starts, size):
            first = overlap.offset
            tensor = stored[overlap.piece]
            values = self.tensors.slice(tensor.name, first, first + overlap.count)
            slices.append(values.float() + tensor.shift if tensor.shift else values)
        return slices[0] if len(slices) == 1 else torch.cat(slices)

    def tokenizer_identities(self) -> Iterator[str]:
        """Yields the known identities of the tokenizer that the model was trained with, see data/tokenizer.py."""
        yield self.tokenizer
        yield from identities_in(self.tokenizer_path)

    def use_tokenizer(self, path: Path) -> None:
        """Replaces the tokenizer of the model by the one in the folder `path`. Raises UserError if there is none."""
        folder = tokenizer_path_in(path)
        if folder is None:
            raise unexpected_path_error(path, "a tokenizer")
        self.tokenizer_path = folder

    def _check(self, rank: int) -> None:
        """Raises UserError unless the tensors have exactly the names and shapes of the model's parameters. Rank 0 also compares
        the values of tied weights."""
        shapes = {
            name: shape
            for name, shape in self.tensors.shapes.items()
            if name not in self.unread and not name.endswith(ROTARY_FREQUENCIES)
        }
        if any(name.startswith(MTP_PREFIX) for name in shapes):
            raise UserError(
                f"{self.source} contains layers for multi-token prediction (MTP), which this program does not support; "
                "load and save the model with transformers to remove them"
            )
        embedding = self.stored[EMBEDDING][0].name
        if self.config.tie_embeddings and LM_HEAD in shapes and embedding in shapes:
            if rank == 0 and not torch.equal(
                self.tensors.get(LM_HEAD), self.tensors.get(embedding)
            ):
                raise UserError(
                    f"{self.source}: {LM_HEAD} differs from {embedding}, but they are tied in the config; correct the config "
                    "(tie_word_embeddings or tie_embeddings)"
                )
            del shapes[LM_HEAD]
        wanted = {tensor.name: tensor.shape for tensor in chain(*self.stored.values())}
        check_same_tensors(self.source, wanted, shapes)


def read_weights(source: str | Path, *, model_name: str = "") -> Weights:
    """Finds and opens weights in a single process.

    source: the path of the model, see the top of this file. model_name: the preset of a model without config.json. Raises
    UserError if the weights can't be read."""
    model = ModelConfig(**preset(model_name)) if model_name else None
    return find_weights(source, model).open(World.alone())


def find_weights(source: str | Path, model: ModelConfig | None = None) -> Weights:
    """Finds weights, without opening them.

    source: the path of the model, see the top of this file. model: the configuration of the model, for a file of weights
    without a config.json next to it. Raises UserError if the path is not a model, or if this program can't represent the
    model.
    """
    check_model_path(source)
    path = Path(source)
    if is_file(path):
        return _find_file(path, model)
    if is_file(path / COMMIT) or is_folder(path / CHECKPOINTS):
        return _find_checkpoint(path)
    return _find_in_folder(path, read_description(path / MODEL_CONFIG))


def _find_checkpoint(path: Path) -> Weights:
    """Finds the newest checkpoint with a readable state.json. If it turns out to be damaged when it is opened, an older one is
    used."""
    found = find_newest_checkpoint(path, report=lambda text: None)
    run = SavedRun.from_state(found.contents.state, found.path)
    model = Description(parse_model_config(found.path, run.model), seq_length=run.seq_length)
    tokenizer_path = tokenizer_path_in(found.path.parent.parent)
    return Weights(path, model, tokenizer_path, run.progress.tokenizer, found)


def _find_file(file: Path, model: ModelConfig | None) -> Weights:
    folder = file.parent
    if is_file(folder / MODEL_CONFIG):
        description = read_description(folder / MODEL_CONFIG)
    elif model:
        description = Description(model)
    else:
        open_file(file)  # raises UserError if the file does not contain weights
        raise UserError(
            f"{file}: there is no {MODEL_CONFIG} next to it, which describes the model; give its preset, as in "
            f"model_name=mamba-130m; {command('inspect')} {file} lists its tensors"
        )
    if file.suffix in TRAINER_SUFFIXES:
        description.architecture = None
    if description.architecture:  # the weights can consist of several files
        return _find_in_folder(folder, description)
    return _from_file(file, description)


def _find_in_folder(folder: Path, description: Description) -> Weights:
    ours = () if description.architecture else (CONSOLIDATED,)
    names = (*ours, SINGLE, INDEX, PICKLED)
    for name in names:
        if is_file(folder / name):
            return _from_file(folder / name, description)
    refuse_dcp(folder)
    raise UserError(
        f"{folder} has a {MODEL_CONFIG}, but no weights next to it; add {' or '.join(names)}"
    )


def _from_file(file: Path, description: Description) -> Weights:
    tokenizer_path = tokenizer_path_in(file.parent)
    return Weights(file, description, tokenizer_path)


def open_file(path: Path, config: ModelConfig | None = None) -> TensorSource:
    """Opens a file. Returns its tensors, with the names of fms translated.

    config: see FmsTensors. Raises UserError if the file can't be read or is a part of a checkpoint."""
    if path.suffix == DCP_SUFFIX:
        refuse_dcp(path.parent)
    if is_file(path.parent / COMMIT):
        raise UserError(
            f"{path} is one rank's part of a checkpoint; give the checkpoint instead: {path.parent}"
        )
    kind: type[PthTensors | SafetensorsTensors] = PthTensors
    if path.suffix == ".safetensors" or path.name == INDEX:
        kind = SafetensorsTensors
    tensors = kind(path)
    if FMS_EMBEDDINGS & tensors.shapes.keys():
        return FmsTensors(tensors, config)
    return tensors


def read_description(path: Path) -> Description:
    """Reads the description of a model from a config.json of this program, of state-spaces or of transformers. Raises UserError
    if this program can't represent the model."""
    fields = Fields.read(path)
    if "model_type" in fields.content or "architectures" in fields.content:
        architecture = architecture_of(fields)
        config = without_silent_attention(architecture.read_config(fields))
        return Description(config, architecture)
    if "layers" not in fields.content:
        return Description(state_spaces.read_config(fields))
    seq_length = fields.content.pop("seq_length", None)
    fields.content.pop("averaged", None)
    return Description(parse_model_config(path, fields.content), seq_length=seq_length)
