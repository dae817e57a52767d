"""Compiled kernels, and sizes of blocks that were timed, outlive the job: a requeue and later runs start warm.

A folder shared by all nodes has one archive for each stack, kind of GPU and state of the code. One process of each node
unpacks it into a folder of the node's own disk, which launch/node.py makes for each start and names in KERNELS_ON_NODE:
there Triton (through patches/rank0_cache.py) and torch.compile look first, and write. Rank 0 packs what is new.
"""

import functools
import hashlib
import os
import platform
import re
import shutil
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path

import torch

from config.train_config import TrainConfig
from mamba_fsdp.ops import triton
from mamba_fsdp.parallel.world import World
from mamba_fsdp.storage import exists, hidden_beside


class KernelCache:
    """All ranks call `take` and `tune` at the same place, rank 0 `keep`. Trouble with the folder is one line in the log
    and costs the warm start only; of two runs that pack at once, one's archive stays."""

    def __init__(self, settings: TrainConfig, world: World, say: Callable[[str], None]) -> None:
        self.settings, self.world, self.say = settings, world, say
        compiles = world.device.type == "cuda" or settings.parallel.use_torch_compile
        wanted = (
            compiles
            and settings.training.kernel_cache != "none"
            and "KERNELS_ON_NODE" in os.environ
        )
        self.local = Path(os.environ["KERNELS_ON_NODE"]) if wanted else None
        self.kept = 0  # files in the archive

    @functools.cached_property
    def archive(self) -> Path:
        """Asked for by all ranks first: rank 0 alone reads the code that its name tells."""
        return self.settings.kernel_folder() / self.world.on_rank0(
            lambda: f"{kind_of(self.world.device)}.zip"
        )

    def take(self) -> None:
        """Returns when each node has what the archive holds."""
        if self.local:
            archive = self.archive  # all ranks ask here, and not in the threads of some
            self.kept = self.world.run_local(lambda: self._unpack(archive))
            self.say(f"compiled   {self.kept or 'no'} files of kernels in {archive}")

    def _unpack(self, archive):
        try:
            if not self.world.local_rank and exists(archive):
                shutil.unpack_archive(archive, self.local)
        except (OSError, zipfile.BadZipFile, zlib.error) as error:
            shutil.rmtree(self.local, ignore_errors=True)
            self.say(
                f"compiled   can't unpack the kernels ({error}): they are compiled and packed again"
            )
        return len(self._files())

    def _files(self):
        return [path for path in self.local.rglob("*") if path.is_file() and path.suffix != ".tmp"]

    def keep(self) -> None:
        """Packs this node's files where there are new ones."""
        if not self.local or len(files := self._files()) <= self.kept:
            return
        partial = hidden_beside(self.archive)
        try:
            partial.parent.mkdir(parents=True, exist_ok=True)
            with zipfile.ZipFile(partial, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
                for path in files:
                    archive.write(path, path.relative_to(self.local))
            partial.replace(self.archive)
            self.kept = len(files)
        except OSError as error:
            self.say(
                f"compiled   kernels can't be kept ({error}); kernel_cache names another folder"
            )

    def tune(self, run_kernels: Callable[[], None]) -> None:
        """Has rank 0 time the sizes of blocks, unless a run of the same shapes has done so, and tell them to all
        ranks. They are timed once: a restart computes with the same."""
        model, data, training = self.settings.model, self.settings.data, self.settings.training
        shapes = f"{model} {training.batch_size} {data.seq_length} {training.mixed_precision}"
        path = self.archive.with_suffix(f".{hashlib.sha256(shapes.encode()).hexdigest()[:8]}.json")

        def timed():
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                triton.tune(run_kernels, path)
            except OSError as error:
                self.say(
                    f"blocks     the timed sizes can't be kept ({error}); kernel_cache names another folder"
                )
            return triton.tuned

        triton.tuned.update(self.world.on_rank0(timed))
        self.say(f"blocks     of the sizes in {path}, as timed")


def kind_of(device: torch.device) -> str:
    """Stack, GPU and code, as the name of a file."""
    sources = sorted(Path(triton.__file__).parent.rglob("*.py"))
    code = hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()[:12]
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    return re.sub(r"[^\w.+-]+", "_", f"torch{torch.__version__}-{name}-{code}")
