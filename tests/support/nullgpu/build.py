"""Builds the null device, a GPU that computes nothing, and says how a command runs on it. README.md says what it is."""

import os
import subprocess
import sysconfig
from pathlib import Path

from tests.support import cuda_stand_ins

SOURCES = Path(__file__).parent
PROJECT = SOURCES.parents[2]
# A function of cuBLAS that blas.c does not have, whose definition wins over a weak one.
COMPUTES = """__attribute__((weak)) int {name}(void) {{
    nullgpu_count(BLAS_CALLS, 1);
    return 0;
}}
"""
COMPILE = ["gcc", "-std=gnu11", "-shared", "-fPIC", "-O1", "-Wall", "-Werror"]


def build(folder):
    """Build its libraries into the folder, against the headers of CUDA's runtime that torch 2.2 brings."""
    packages = Path(sysconfig.get_paths()["purelib"])
    headers = [f"-I{SOURCES}", f"-I{packages}/nvidia/cuda_runtime/include"]
    products = folder / "products.c"
    names = cuda_stand_ins.functions()
    computed = [*names["libcublas.so.12"], *names["libcublasLt.so.12"]]
    products.write_text(
        '#include "device.h"\n' + "".join(COMPUTES.format(name=n) for n in computed)
    )
    sources = [SOURCES / "runtime.c", SOURCES / "blas.c", products]
    runtime = ["-Wl,-soname,libnullgpu.so", *sources, "-lpthread"]
    driver = [SOURCES / "driver.c", f"-L{folder}", "-lnullgpu", "-Wl,-rpath,$ORIGIN"]
    subprocess.run([*COMPILE, *headers, *runtime, "-o", folder / "libnullgpu.so"], check=True)
    subprocess.run([*COMPILE, *headers, *driver, "-o", folder / "libcuda.so.1"], check=True)
    (folder / "libcuda.so").symlink_to("libcuda.so.1")  # by this name Triton links its launchers


def environment(folder, **more):
    """The environment of a command that runs on it. more: as runtime.c explains, such as NULLGPU_MEMORY=10**9."""
    return {
        **os.environ,
        "LD_PRELOAD": str(folder / "libnullgpu.so"),
        "LD_LIBRARY_PATH": str(folder),
        "TRITON_LIBCUDA_PATH": str(folder),
        "TRITON_CACHE_DIR": str(folder / "triton"),
        "PYTHONPATH": f"{PROJECT}:{SOURCES / 'start'}",
        "OMP_NUM_THREADS": "1",
        **{name: str(value) for name, value in more.items()},
    }
