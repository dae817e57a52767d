"""Gives Triton's cache one writer: rank 0 publishes what it compiled, every other rank keeps its own copy to itself.

Triton lets every process write into one cache folder. On a cluster that folder often lies on a shared file system, and
then ranks take each other's temporary files away (equal pids on several hosts and equally seeded generators give equal
names), replace libraries that others have mapped ("Stale file handle") and mix files of different compilations.

The policy, whatever the ranks compile and in whatever order:
- Only rank 0 creates anything in the shared folder (TRITON_RANK0_SCOPE=global, the default), or the first rank of each
  node (TRITON_RANK0_SCOPE=node, for folders that are local to a node). The rank is read from the environment, so it
  is known before any process group exists; a process without a rank writes as Triton does.
- Every other rank keeps what it compiled in a private folder of its own process, below TRITON_RANK0_PRIVATE_DIR or the
  system's temporary folder, removed at exit.
- Reads look into the shared folder first and the private one second, so that no rank ever lacks a file it has put.
- Nobody waits for anybody. A barrier would hang as soon as ranks differ in what they compile or find.
- If a shared folder can't be written, rank 0 keeps its files private too, with one warning.

`apply.py` puts this file next to Triton's own cache module. Triton 2.2 is patched to use the class always; newer ones
use it with TRITON_CACHE_MANAGER=triton.runtime.rank0_cache:Rank0CacheManager. Only the standard library is needed.
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
    """Returns whether this process publishes into shared folders. Raises ValueError for an unknown
    TRITON_RANK0_SCOPE."""
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
    """Returns Triton's own folder for `kind`: cache, dump or override. TRITON_DUMP_DIR and TRITON_OVERRIDE_DIR, new in
    Triton 3.4, hold for Triton 2.2 too: it dumps every kernel, and a container's home folder is no place for that."""
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
    """Returns the private folder of this process, made on first use."""
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
)  # only the process that made the folder may remove it


def _publish(folder, filename, data):
    """Writes `data` (bytes) so that readers see all of it or nothing. Returns the path. Raises OSError as the disk
    does."""
    path = os.path.join(folder, filename)
    with contextlib.suppress(OSError):
        with open(path, "rb") as file:
            if file.read() == data:
                return path  # others may have it open or mapped: its inode must stay
    os.makedirs(folder, exist_ok=True)
    temporary = os.path.join(
        folder, f".{uuid.uuid4().hex}.tmp"
    )  # neither pid nor `random` is unique over hosts
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
    """The files of one kernel under `key`, with Triton's interface. Its constructor, unlike Triton's, creates no
    folder."""

    def __init__(self, key, override=False, dump=False):
        self.key = key
        self._kind = "dump" if dump else "override" if override else "cache"
        self._root = _shared_root(self._kind)
        if not self._root:
            raise RuntimeError(
                "Could not create or locate cache dir"
            )  # Triton's own answer to an empty TRITON_CACHE_DIR
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
        """Keeps `data` (bytes, or anything that str() turns into text). Returns the path under which this process finds
        it."""
        data = data if isinstance(data, bytes) else str(data).encode()
        if self._publishes:
            try:
                return _publish(self.cache_dir, filename, data)
            except OSError as error:
                self._publishes = False  # a later group file must not name a file that isn't there
                warnings.warn(
                    f"Triton's {self._kind} folder {self._root} can't be written ({error.strerror}); "
                    "what this process compiles stays private to it and is lost when it ends",
                    stacklevel=1,
                )
        return _publish(os.path.join(_own_root(), self._kind, self.key), filename, data)

    def get_group(self, filename):
        """Returns the group's files as {name: path}, all from one folder, or None: then Triton compiles."""
        for folder in self._folders():
            try:
                with open(os.path.join(folder, f"__grp__{filename}"), encoding="utf-8") as file:
                    names = json.load(file)["child_paths"]
                # only names: the writer may have mounted the folder elsewhere
                group = {name: os.path.join(folder, name) for name in names}
            except (OSError, ValueError, TypeError, KeyError):
                continue
            if group and all(os.path.exists(path) for path in group.values()):
                return group
        return None
