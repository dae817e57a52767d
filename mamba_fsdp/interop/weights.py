"""Reads a model's weights from any path that names a model, under our names and slice by slice.

    RUN                          a run folder: its newest checkpoint
    RUN/checkpoints/step_...     one checkpoint
    .../consolidated.00.pth      a state dict, or what a trainer saved it in (fms_files.py), with config.json next to it
    a folder                     with config.json and: model*.safetensors or pytorch_model.bin (transformers),
                                 pytorch_model.bin (state-spaces), consolidated.00.pth or model.safetensors (ours)

If there is no config.json, the caller has to name the model.

Finding weights reads which model they are of, but not the weights; it comes before the ranks meet. Opening them, which
all ranks do together, verifies a checkpoint and checks names and shapes of all tensors. Nothing is executed.
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
from mamba_fsdp.interop.places import check_place, refuse_dcp
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
OF_TRAINERS = (".pth", ".pt")  # files with our names or fms', whatever config.json is next to them
DCP_PART = ".distcp"  # of torch.distributed.checkpoint
MTP = "mtp."  # how names of layers that predict further tokens begin
OLDER_LLAMA = "rotary_emb.inv_freq"  # its files hold this, though it follows from the config


@dataclass
class Description:
    """The model that a config.json describes."""

    config: ModelConfig
    architecture: Architecture | None = None  # of transformers; None for tensors with our names
    seq_length: int | None = None  # of the training; None if unknown


class Weights(TensorSource):
    """The weights of one model, wherever they are stored. They have to be opened before they are read.

    shapes: of all parameters by name, without a tied lm_head.weight. tokenizer: its identity if a checkpoint has it.
    """

    def __init__(
        self,
        path: Path,
        model: Description,
        tokenizer_path: Path | None,
        tokenizer: str = "",
        found: CheckpointCandidate | None = None,
    ):
        """Reads nothing yet. path: of a file, of a checkpoint or of a run folder. found: the checkpoint, if it is one."""
        self.path = path
        self.found = found
        self.config = model.config
        self.seq_length = model.seq_length
        self.tokenizer_path = tokenizer_path
        self.tokenizer = tokenizer
        self.parameters = parameters(model.config)
        self.shapes = {name: parameter.shape for name, parameter in self.parameters.items()}
        self.stored = {name: [StoredTensor(name, shape)] for name, shape in self.shapes.items()}
        self.unread: set[str] = set()  # names of tensors that add nothing
        self.aliases: dict[str, str] = {}  # see Architecture
        self.swapped: tuple[str, ...] = ()  # endings of names, see Architecture
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

        use: what each rank then does with them; it does not communicate.
        """
        whole = None
        if self.found:
            whole = find_checkpoint(self.path, world, part="model", found=self.found)

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
        """Returns the tensors that make up a parameter, named and cut as in the file: transformers saves the three
        parts of Olmo Hybrid's convolutions in equal sizes."""
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
        """Returns elements [start, stop) of the stored tensors that make up a parameter, one after the other."""
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
        """Yields the identities of the tokenizer that the model was trained with, as far as they are known; see
        data/tokenizer.py."""
        yield self.tokenizer
        yield from identities_in(self.tokenizer_path)

    def use_tokenizer(self, path: Path) -> None:
        """Takes the tokenizer in the folder `path` instead of the model's. Raises UserError if there is none."""
        folder = tokenizer_path_in(path)
        if folder is None:
            raise unexpected_path_error(path, "a tokenizer")
        self.tokenizer_path = folder

    def _check(self, rank: int) -> None:
        """Raises UserError unless the tensors are exactly the model's. Rank 0 alone compares the values of tied ones."""
        shapes = {
            name: shape
            for name, shape in self.tensors.shapes.items()
            if name not in self.unread and not name.endswith(OLDER_LLAMA)
        }
        if any(name.startswith(MTP) for name in shapes):
            raise UserError(
                f"{self.source} holds layers that predict further tokens (MTP), which this program does not have; load "
                "and save the model with transformers, which leaves them out"
            )
        embedding = self.stored[EMBEDDING][0].name
        if self.config.tie_embeddings and LM_HEAD in shapes and embedding in shapes:
            if rank == 0 and not torch.equal(
                self.tensors.get(LM_HEAD), self.tensors.get(embedding)
            ):
                raise UserError(
                    f"{self.source}: {LM_HEAD} differs from {embedding}, but the config says that they are "
                    "one (tied embeddings)"
                )
            del shapes[LM_HEAD]
        wanted = {tensor.name: tensor.shape for tensor in chain(*self.stored.values())}
        check_same_tensors(self.source, wanted, shapes)


def read_weights(source: str | Path, *, model_name: str = "") -> Weights:
    """Returns the Weights that `source` names, opened by one process. model_name: the preset of a model without
    config.json."""
    model = ModelConfig(**preset(model_name)) if model_name else None
    return find_weights(source, model).open(World.alone())


def find_weights(source: str | Path, model: ModelConfig | None = None) -> Weights:
    """Returns the Weights that the path `source` names, not yet open.

    model: of a file without config.json. Raises UserError if there is no model, or one that ours can't represent.
    """
    check_place(source)
    path = Path(source)
    if is_file(path):
        return _find_file(path, model)
    if is_file(path / COMMIT) or is_folder(path / CHECKPOINTS):
        return _find_checkpoint(path)
    return _find_in_folder(path, read_description(path / MODEL_CONFIG))


def _find_checkpoint(path: Path) -> Weights:
    """Returns the Weights of the newest checkpoint with a readable state.json; opening them chooses the newest whole
    one."""
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
        open_file(file)  # refuses a file without weights
        raise UserError(
            f"{file}: there is no {MODEL_CONFIG} next to it to say what model this is; name its preset, as in "
            f"model_name=mamba-130m; {command('inspect')} {file} lists its tensors"
        )
    if file.suffix in OF_TRAINERS:
        description.architecture = None
    if description.architecture:  # the file may be one of several
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
        f"{folder} has a {MODEL_CONFIG} but no weights next to it ({' or '.join(names)})"
    )


def _from_file(file: Path, description: Description) -> Weights:
    tokenizer_path = tokenizer_path_in(file.parent)
    return Weights(file, description, tokenizer_path)


def open_file(path: Path, config: ModelConfig | None = None) -> TensorSource:
    """Returns the model's tensors in a file, with fms' names turned into ours. config: see FmsTensors. Raises
    UserError."""
    if path.suffix == DCP_PART:
        refuse_dcp(path.parent)
    if is_file(path.parent / COMMIT):
        raise UserError(
            f"{path} is one rank's part of a checkpoint; name the checkpoint instead: {path.parent}"
        )
    kind: type[PthTensors | SafetensorsTensors] = PthTensors
    if path.suffix == ".safetensors" or path.name == INDEX:
        kind = SafetensorsTensors
    tensors = kind(path)
    if FMS_EMBEDDINGS & tensors.shapes.keys():
        return FmsTensors(tensors, config)
    return tensors


def read_description(path: Path) -> Description:
    """Returns the model that a config.json describes: one of ours, of state-spaces or of transformers. Raises UserError."""
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
