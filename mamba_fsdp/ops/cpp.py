"""Compiles the C library of the cpp backends on first use into a cache folder, and loads it through ctypes.

The library's name is a hash of its sources, the flags, the compiler and the processor, so that an outdated
library, or one of another machine, is never loaded. The library is written under another name and then renamed, so that
any number of processes can start at once. It is linked without an OpenMP runtime, and uses PyTorch's runtime and its
threads.
"""

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Mapping
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mamba_fsdp.ops.backends import Use
from mamba_fsdp.storage.retry import exists, open_to_read, read_bytes, read_text

FOLDER = Path(__file__).parent
HEADER = FOLDER / "cpp.h"
SOURCES = sorted(FOLDER.rglob("*.c"))
# {dtype of the activations: the compiler's flags for it}
TYPES = {torch.float32: (), torch.bfloat16: ("-DIO_BFLOAT16",), torch.float64: ("-DREAL_DOUBLE",)}
FLAGS = [
    "-O3",
    "-march=native",
    "-fopenmp",
    "-fPIC",
    "-ffp-contract=fast",
    "-fno-math-errno",
    "-fno-trapping-math",
]
if platform.machine() == "x86_64":
    FLAGS.append("-mprefer-vector-width=512")
COMPILE_SECONDS = 120


class Unavailable(Exception):
    """The exception for a machine that can't use the C backends. Its message is the reason, in one line."""


def _run(command: list[str]) -> str:
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_SECONDS)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Unavailable(f"the C compiler {command[0]} does not run: {error}") from error
    if result.returncode:
        output = (result.stderr or result.stdout).strip()
        first = output.splitlines()[0] if output else f"exit status {result.returncode}"
        raise Unavailable(f"the C compiler {command[0]} fails: {first}")
    return result.stdout


def _compiler() -> list[str]:
    """Returns the command of the C compiler, as a list. Raises Unavailable if there is none."""
    named = os.environ.get("CC", "").split()
    if named:
        return named
    for name in ("gcc", "cc", "clang"):
        if shutil.which(name):
            return [name]
    raise Unavailable("there is no C compiler (gcc, cc or clang; set CC to name one)")


def _processor() -> str:
    """Returns a text that differs between processors with different instructions."""
    try:
        lines = set(read_text("/proc/cpuinfo").splitlines())
    except OSError:
        return platform.processor()
    telling = ("model name", "flags", "Features", "CPU part")
    return "".join(sorted(line for line in lines if line.startswith(telling)))


def _caches() -> Path:
    """Returns the user's folder of caches. Raises Unavailable if there is none."""
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError as error:  # the machine does not know the user
        raise Unavailable(
            "there is no home folder to compile the C backend into; set HOME or XDG_CACHE_HOME"
        ) from error


def _compile(compiler: list[str], defines: tuple[str, ...], path: Path) -> None:
    """Compiles the sources into `path`; if that fails, `path` is not written."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        objects = []
        for source in SOURCES:
            target = str(Path(folder) / f"{source.stem}.o")
            _run([*compiler, *FLAGS, *defines, f"-I{FOLDER}", "-c", str(source), "-o", target])
            objects.append(target)
        library = Path(folder) / "library.so"
        # -fopenmp is left out because it would link a second OpenMP runtime besides PyTorch's.
        _run([*compiler, "-shared", *objects, "-o", str(library), "-lm"])
        with open_to_read(library) as file:
            os.fsync(file.fileno())  # a half-written library would crash a process that loads it
        os.replace(library, path)


@functools.lru_cache(maxsize=None)
def library(dtype: torch.dtype) -> ctypes.CDLL:
    """Returns the C operators for activations of `dtype`, compiled if needed. Raises Unavailable with the reason."""
    compiler = _compiler()
    defines = TYPES[dtype]
    sources = b"".join(map(read_bytes, (HEADER, *SOURCES)))
    version = _run([*compiler, "--version"])
    identity = repr((sources, FLAGS, defines, compiler, version, _processor()))
    path = _caches() / f"mamba_fsdp/ops-{hashlib.sha256(identity.encode()).hexdigest()}.so"
    try:
        if not exists(path):
            _compile(compiler, defines, path)
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise Unavailable(
            f"the C backend can't be written to or loaded from {path}: {error}"
        ) from error


def why_unavailable(dtype: torch.dtype = torch.float32) -> str | None:
    """Returns why the C backends for activations of `dtype` can't be compiled or loaded, or None if they can."""
    try:
        library(dtype)
    except Unavailable as reason:
        return str(reason)
    return None


def why_not(use: Use) -> str | None:
    """Returns why the C backends can't serve a Use, or None if they can. See backends.py."""
    if use.dtype not in TYPES:
        return f"there is no C for {use.dtype}"
    return why_unavailable(use.dtype)


def structure(numbers: str, pointers: str) -> type[ctypes.Structure]:
    """Returns the ctypes.Structure of a C operator's arguments. Its first field is `threads`, an int64.

    numbers, pointers: the names of the int64 fields and of the pointers that follow, separated by spaces."""
    fields: list[tuple[str, Any]] = [
        (name, ctypes.c_int64) for name in ("threads", *numbers.split())
    ]
    fields += [(name, ctypes.c_void_p) for name in pointers.split()]
    return type("Arguments", (ctypes.Structure,), {"_fields_": fields})


def call(
    function: Callable[..., int], structure: type[ctypes.Structure], values: Mapping[str, Any]
) -> None:
    """Calls a C operator with a structure of these values, by name. A tensor NAME gives its address and, if the
    structure has a field NAME_row, also the distance between its positions. Does nothing for tensors on the meta
    device. Raises MemoryError if the operator has not enough memory."""
    if any(isinstance(value, torch.Tensor) and value.is_meta for value in values.values()):
        return
    arguments = structure(threads=torch.get_num_threads())
    for name, value in values.items():
        if isinstance(value, torch.Tensor):
            if hasattr(structure, f"{name}_row"):
                setattr(arguments, f"{name}_row", value.stride(1))
            value = value.data_ptr()
        setattr(arguments, name, value)
    if function(ctypes.byref(arguments)):
        raise MemoryError(f"{function.__name__}: no memory for a thread's scratch")


def as_rows(*activations: Tensor | None) -> list[Tensor]:
    """Returns the activations, each (batch, length, channels) or None, in C's layout: contiguous channels, and evenly
    spaced positions over the whole batch.

    The backend was chosen for these inputs, so another device or dtype, or a mixture, is a programmer's mistake.
    """
    kinds = {(a.device.type, a.dtype) for a in activations if a is not None}
    assert len(kinds) == 1 and kinds <= set(product(("cpu", "meta"), TYPES)), (
        f"there is no C backend for {kinds}"
    )
    rows = []
    for a in activations:
        if a is not None and (a.stride(2) != 1 or a.stride(0) != a.shape[1] * a.stride(1)):
            a = a.contiguous()
        rows.append(a)
    return rows


def flushes_denormals() -> bool:
    """Returns whether denormal numbers count as 0 in this thread."""
    smallest = torch.full((), 1e-310, dtype=torch.float64)
    return not (smallest * 0.5).item()


def flush_denormals(asked: bool) -> None:
    """Sets whether denormal numbers count as 0, in this thread and in the OpenMP threads that share its operations. Each
    thread has its own mode, and a new thread inherits it from the thread that creates it."""
    torch.set_flush_denormal(asked)
    threads = torch.get_num_threads()
    # This is a function of PyTorch's OpenMP runtime.
    run_on_each = getattr(ctypes.CDLL(None), "GOMP_parallel", None)
    if run_on_each:
        kind = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
        run_on_each(kind(lambda _: torch.set_flush_denormal(asked) and None), None, threads, 0)


def tune_process(device_type: str) -> None:
    """Makes training on a CPU faster, for the whole process; call it once, before the first step. It does nothing for a
    process with a GPU, where the memory of copies for checkpoints has to go back to the system.

    Denormal numbers count as 0, because decayed states become denormal, which makes arithmetic a hundred times slower.
    glibc is told to keep freed memory up to 1 GiB for the next step; otherwise the system would clear each page again.
    Other C libraries ignore this.
    """
    if device_type != "cpu":
        return
    flush_denormals(True)
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt:
        mallopt(-3, 1 << 30)  # M_MMAP_THRESHOLD
        mallopt(-1, 1 << 30)  # M_TRIM_THRESHOLD
