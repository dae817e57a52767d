"""Builds the null device, a GPU that computes nothing, and provides the environment of a command that runs on it.
README.md describes the device."""

import functools
import importlib.util
import os
import re
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

from benchmarks.kernels.install import installed

SOURCES = Path(__file__).parent
PROJECT = SOURCES.parents[2]
# The newest tested CUDA build of torch and its headers, for a Python without a CUDA build.
NEWEST = ("torch==2.11.0", "triton==3.6.0", "nvidia-cuda-runtime==13.0.96")
# Libraries that torch only calls to compute. An installed library is not replaced, except for cuBLAS and NVRTC.
LIBRARIES = "cublas|cudnn|cufft|cufile|cupti|curand|cusolver|cusparse|nccl|nvrtc|nvshmem|nvtx"
# The weak definition of a function of these libraries. A definition in others.c has priority.
STUB = """__attribute__((weak)) int {name}(void) {{
    nullgpu_count(BLAS_CALLS, 1);
    return 0;
}}
"""
COMPILE = ["gcc", "-std=gnu11", "-shared", "-fPIC", "-O1", "-Wall", "-Werror"]


@functools.cache
def packages():
    """Returns the folder of packages that contains torch's CUDA build. This is the folder of this Python if its torch
    has CUDA. Otherwise it is a separate folder, into which the packages NEWEST are installed at the first use. Raises
    OSError if the installation fails."""
    own = Path(importlib.util.find_spec("torch").origin).parents[1]
    if (own / "torch/lib/libtorch_cuda.so").exists():
        return own
    return installed("torch-2.11.0", *NEWEST)


def interpreter(folder):
    """Returns the path of a Python that can import torch's CUDA build. This is the current Python if possible.
    Otherwise it is the Python of a new virtual environment in the folder, which can also import the other packages of
    the current one."""
    if str(packages()) in sys.path:
        return sys.executable
    made = folder / "venv"
    if not made.exists():
        venv.create(made)
        (own,) = made.glob("lib/python*/site-packages")
        here = sysconfig.get_paths()["purelib"]
        (own / "found.pth").write_text(f"{packages()}\n{here}\n")
    return str(made / "bin/python")


def build(folder):
    """Builds the libraries of the null device into the folder, for torch's CUDA build and with its headers."""
    cuda = packages() / "nvidia/cu13"
    if not cuda.exists():
        cuda = packages() / "nvidia/cuda_runtime"
    headers = [f"-I{SOURCES}", f"-I{cuda}/include"]
    products = folder / "products.c"
    products.write_text(
        '#include "device.h"\n' + "".join(STUB.format(name=name) for name in called_functions())
    )
    sources = [SOURCES / "runtime.c", SOURCES / "others.c", products]
    runtime = ["-Wl,-soname,libnullgpu.so", *sources, "-lpthread"]
    driver = [SOURCES / "driver.c", f"-L{folder}", "-lnullgpu", "-Wl,-rpath,$ORIGIN"]
    subprocess.run([*COMPILE, *headers, *runtime, "-o", folder / "libnullgpu.so"], check=True)
    subprocess.run([*COMPILE, *headers, *driver, "-o", folder / "libcuda.so.1"], check=True)
    (folder / "libcuda.so").symlink_to("libcuda.so.1")  # Triton links its launchers with this name
    for name in missing_libraries():
        (folder / name).symlink_to("libnullgpu.so")


@functools.cache
def inspect_libraries(words):
    """Returns the output of a program of binutils for torch's libraries."""
    libraries = sorted(packages().glob("torch/lib/*.so"))
    done = subprocess.run([*words, *libraries], capture_output=True, text=True, check=True)
    return done.stdout


def missing_libraries():
    """Returns the libraries of NVIDIA that torch links but that are not installed. libnullgpu.so replaces all of them."""
    linked = set(re.findall(r"\(NEEDED\).*\[(.*)\]", inspect_libraries(("readelf", "-d"))))
    named = {name for name in linked if re.match(f"lib({LIBRARIES})", name, re.IGNORECASE)}
    return {name for name in named if not list(packages().glob(f"nvidia/**/{name}"))}


def called_functions():
    """Returns the functions of the replaced libraries that torch calls."""
    called = set(re.findall(r"^ +U (\w+)", inspect_libraries(("nm", "-D")), re.MULTILINE))
    replaced = {
        "cublas",
        "nvrtc",
        *(re.match("lib([a-z]+)", name)[1] for name in missing_libraries()),
    }
    return sorted(name for name in called if re.match("|".join(replaced), name, re.IGNORECASE))


def environment(folder, **more):
    """Returns the environment of a command that runs on the null device. more: the variables that runtime.c documents,
    such as NULLGPU_MEMORY=10**9."""
    variables = {
        "LD_PRELOAD": str(folder / "libnullgpu.so"),
        "LD_LIBRARY_PATH": str(folder),
        "TRITON_LIBCUDA_PATH": str(folder),
        "TRITON_CACHE_DIR": str(folder / "triton"),
        "PYTHONPATH": f"{PROJECT}:{SOURCES / 'start'}",
        "OMP_NUM_THREADS": "1",
    }
    return {**os.environ, **variables, **{name: str(value) for name, value in more.items()}}
