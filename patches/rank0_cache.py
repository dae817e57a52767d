"""Gives Triton's shared kernel cache a single writer. Rank 0 writes its compiled kernels there; every other rank writes
its own to a private folder.

By default, Triton lets every process write to the same cache folder. On a cluster, that folder is often on a shared file
system. Then ranks can use the same name for a temporary file, because process ids and the state of `random` can be equal
on several hosts, and one rank removes the file of another. Ranks also replace libraries that other ranks have mapped
("Stale file handle"), and mix files of different compilations.

The rules are the same whatever the ranks compile, and in whatever order:
- Only one rank writes to the shared folder: rank 0 (TRITON_RANK0_SCOPE=global, the default), or the first rank of each
  node (TRITON_RANK0_SCOPE=node, for a folder on the node's own disk). The rank is read from the environment, so it is
  known before a process group exists. A process without a rank writes to the shared folder too, as with Triton itself.
- Every other rank writes its compiled kernels to a private folder of its process. That folder is in
  TRITON_RANK0_PRIVATE_DIR or the system's temporary folder, and is removed when the process exits.
- A rank reads from the shared folder first and from its private folder second, so it always finds a file that it wrote.
- Ranks do not wait for each other. A barrier would block if the ranks compile or find different kernels.
- If rank 0 can't write to the shared folder, it prints one warning and writes to a private folder too.

`apply.py` copies this file next to Triton's cache module. Triton 2.2 is patched to always use the class. Newer versions
use it with TRITON_CACHE_MANAGER=triton.runtime.rank0_cache:Rank0CacheManager. This file needs only the standard library
and Triton.
"""

import atexit
import contextlib
import json
import os
import shutil
import tempfile
import uuid
import warnings
from pathlib import Path

from triton.runtime.cache import FileCacheManager

try:
    from triton import knobs
except ImportError:  # older than Triton 3.4
    knobs = None

_private_root = None


def is_writer():
    """Returns whether this process writes to shared folders. Raises ValueError for an unknown TRITON_RANK0_SCOPE."""
    scope = os.environ.get("TRITON_RANK0_SCOPE", "global")
    if scope not in ("global", "node"):
        raise ValueError(
            f"TRITON_RANK0_SCOPE is {scope!r}; set it to global (one shared cache folder) or node (one per node)"
        )
    local = ("LOCAL_RANK", "SLURM_LOCALID") if scope == "node" else ()
    for name in (*local, "RANK", "SLURM_PROCID"):
        if os.environ.get(name, "").isdecimal():
            return int(os.environ[name]) == 0
    return True


def _shared_root(kind):
    """Returns the folder that Triton uses for `kind`: cache, dump or override.

    TRITON_DUMP_DIR and TRITON_OVERRIDE_DIR are new in Triton 3.4, but this function reads them for Triton 2.2 too. Triton
    2.2 dumps every kernel, by default to the home folder, where a container should not write."""
    if knobs:
        return {
            "cache": knobs.cache.dir,
            "dump": knobs.cache.dump_dir,
            "override": knobs.cache.override_dir,
        }[kind]
    return os.environ.get(f"TRITON_{kind.upper()}_DIR", "").strip() or os.path.join(
        Path.home(), ".triton", kind
    )


def _own_root():
    """Returns the private folder of this process. The first call creates it."""
    global _private_root
    if _private_root is None:
        parent = os.environ.get("TRITON_RANK0_PRIVATE_DIR") or tempfile.gettempdir()
        os.makedirs(parent, exist_ok=True)
        _private_root = tempfile.mkdtemp(prefix="triton-private-", dir=parent)
    return _private_root


@atexit.register
def _remove_own_root():
    if _private_root is not None:
        shutil.rmtree(_private_root, ignore_errors=True)


def _forget_own_root():
    global _private_root
    _private_root = None


os.register_at_fork(
    after_in_child=_forget_own_root
)  # only the process that created the folder removes it, not its forks


def _publish(folder, filename, data):
    """Writes `data` (bytes) to a file atomically: readers see either all of it or nothing. Returns the path of the file.
    Raises OSError if the file can't be written."""
    path = os.path.join(folder, filename)
    with contextlib.suppress(OSError):
        with open(path, "rb") as file:
            if file.read() == data:
                return path  # do not replace it, because other processes can have mapped it
    os.makedirs(folder, exist_ok=True)
    temporary = os.path.join(
        folder, f".{uuid.uuid4().hex}.tmp"
    )  # process ids and `random` can be equal on several hosts
    try:
        with open(temporary, "xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    return path


class Rank0CacheManager(FileCacheManager):
    """The cached files of one kernel, which `key` identifies, with the interface of Triton's FileCacheManager. Unlike
    Triton's constructor, this one does not create a folder."""

    def __init__(self, key, override=False, dump=False):
        self.key = key
        self._kind = "dump" if dump else "override" if override else "cache"
        self._root = _shared_root(self._kind)
        if not self._root:
            raise RuntimeError(
                "Could not create or locate cache dir"
            )  # Triton's own message for an empty TRITON_CACHE_DIR
        self.cache_dir = os.path.join(self._root, key)
        self._publishes = is_writer()

    def _folders(self):
        yield self.cache_dir
        if _private_root is not None:
            yield os.path.join(_private_root, self._kind, self.key)

    def get_file(self, filename):
        paths = (os.path.join(folder, filename) for folder in self._folders())
        return next((path for path in paths if os.path.exists(path)), None)

    def has_file(self, filename):
        return self.get_file(filename) is not None

    def put(self, data, filename, binary=True):
        """Writes `data` to the cache, and returns the path from which this process can read it.

        data: bytes, or an object that str() converts to the text to write."""
        data = data if isinstance(data, bytes) else str(data).encode()
        if self._publishes:
            try:
                return _publish(self.cache_dir, filename, data)
            except OSError as error:
                # Later files are private too, because a group file must be in the same folder as the files that it lists.
                self._publishes = False
                warnings.warn(
                    f"Triton's {self._kind} folder {self._root} can't be written ({error.strerror}); "
                    "what this process compiles stays private to it and is lost when it ends",
                    stacklevel=1,
                )
        return _publish(os.path.join(_own_root(), self._kind, self.key), filename, data)

    def get_group(self, filename):
        """Returns the files of a group as {name: path}, all from the same folder. Returns None if a file is missing, so
        that Triton compiles the kernel."""
        for folder in self._folders():
            try:
                with open(os.path.join(folder, f"__grp__{filename}"), encoding="utf-8") as file:
                    names = json.load(file)["child_paths"]
                # Use only the names in the group file, because the writer can have mounted the folder at another path.
                group = {name: os.path.join(folder, name) for name in names}
            except (OSError, ValueError, TypeError, KeyError):
                continue
            if group and all(os.path.exists(path) for path in group.values()):
                return group
        return None
