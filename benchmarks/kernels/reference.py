"""mamba-ssm's kernels for the table beside ours: its CUDA scan, compiled by nvcc from PyPI as its build does, and its
Triton kernels, of reference_triton.py.

    PYTHONPATH=FOLDER_OF_A_TRITON python -m benchmarks.kernels.reference CC ...

prints one line of JSON, a `report`, for each kernel and architecture (the Triton is there for its disassembler). The
kernels are those for mamba-1.4b: bf16, rows of a multiple of 2048 positions, 128 threads of 16 positions, gated;
instructions are counted in the loop over the states alone. What they read from torch's and ATen's CUDA headers, which a
build of torch for CPUs lacks, is stood in for. Shared memory is chosen at launch and not counted.
"""

import json
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import torch

from benchmarks.kernels import Kernel
from benchmarks.kernels.compiler import PROJECT, Compiled, count, environment
from benchmarks.kernels.install import download, installed
from benchmarks.kernels.machine_code import Loop, loops, resources

MAMBA_SSM = "2.3.1"
NVCC = [
    f"nvidia-{name}==13.*"
    for name in ("cuda-nvcc", "cuda-runtime", "cuda-cccl", "cuda-crt", "nvvm")
]
D_INNER = 4096
STATES = 16
SCAN = dict(
    function=lambda: None,
    signature={},
    constants={},
    elements=2048,
    warps=4,
    per_token=D_INNER * STATES,
)
KERNELS = [  # tensors of (token, d_inner) in bf16 that a pass reads and writes
    Kernel(
        "CUDA scan forward", bytes_per_token=2 * 5 * D_INNER, note="u, dt, z; y, y gated", **SCAN
    ),
    Kernel(
        "CUDA scan backward",
        bytes_per_token=2 * 9 * D_INNER,
        note="u, dt, z, y, dy; du, ddt, dz, y gated",
        **SCAN,
    ),
]
SOURCES = [
    """#include "selective_scan_fwd_kernel.cuh"
template __global__ void selective_scan_fwd_kernel<
    Selective_Scan_fwd_kernel_traits<128, 16, 1, true, true, true, true, at::BFloat16, float>>(SSMParamsBase);
""",
    """#include "selective_scan_bwd_kernel.cuh"
template __global__ void selective_scan_bwd_kernel<
    Selective_Scan_bwd_kernel_traits<128, 16, true, true, true, true, true, at::BFloat16, float>>(SSMParamsBwd);
""",
]
HEADERS = {
    "c10/cuda/CUDAException.h": """#pragma once
#include <cuda_runtime.h>
#define C10_CUDA_CHECK(call) (void)(call)
#define C10_CUDA_KERNEL_LAUNCH_CHECK()
""",
    "ATen/cuda/Atomic.cuh": """#pragma once
#include <c10/util/complex.h>
template <typename T> __device__ inline void gpuAtomicAdd(T *to, T value) { atomicAdd(to, value); }
template <typename T> __device__ inline void gpuAtomicAdd(c10::complex<T> *to, c10::complex<T> value) {
    atomicAdd(&to->real_, value.real_);
    atomicAdd(&to->imag_, value.imag_);
}
""",
}
FLAGS = [
    "-cubin",
    "-std=c++20",
    "-O3",
    "--use_fast_math",
    "--expt-relaxed-constexpr",
    "--expt-extended-lambda",
    "-U__CUDA_NO_HALF_OPERATORS__",
    "-U__CUDA_NO_HALF_CONVERSIONS__",
    "-U__CUDA_NO_BFLOAT16_OPERATORS__",
    "-U__CUDA_NO_BFLOAT16_CONVERSIONS__",
    "-U__CUDA_NO_BFLOAT162_OPERATORS__",
    "-w",
]


def sources() -> Path:
    """The folder of mamba-ssm's sources, from its archive on PyPI. Raises OSError where it can't be had."""
    archive = download(f"mamba-ssm=={MAMBA_SSM}")
    folder = archive.parent / f"mamba_ssm-{MAMBA_SSM}"
    if not folder.exists():
        with tarfile.open(archive) as files:
            files.extractall(archive.parent, filter="data")
    return folder


def compile_scan(source: str, cc: int, folder: Path, nvcc: Path) -> bytes:
    """The cubin. Raises OSError with nvcc's words."""
    with tempfile.TemporaryDirectory() as here:
        for name, text in {"scan.cu": source, **HEADERS}.items():
            (Path(here) / name).parent.mkdir(parents=True, exist_ok=True)
            (Path(here) / name).write_text(text)
        includes = [
            here,
            folder,
            nvcc / "include",
            nvcc / "include" / "cccl",
            nvcc / "cccl",
            *torch_headers(),
        ]
        done = subprocess.run(
            [
                nvcc / "bin" / "nvcc",
                *FLAGS,
                f"-arch=sm_{cc}",
                *(f"-I{path}" for path in includes),
                "-o",
                "scan.cubin",
                "scan.cu",
            ],
            cwd=here,
            capture_output=True,
            text=True,
        )
        if done.returncode:
            raise OSError(
                "nvcc: "
                + next((line for line in done.stderr.splitlines() if "error" in line), "no reason")
            )
        return (Path(here) / "scan.cubin").read_bytes()


def torch_headers() -> list[Path]:
    include = Path(torch.__file__).parent / "include"
    return [include, include / "torch" / "csrc" / "api" / "include"]


def report(made: Compiled, kernel: Kernel) -> None:
    """Prints a line for `answers`, with what the table needs of the kernel."""
    shown = {
        name: getattr(kernel, name)
        for name in ("name", "elements", "bytes_per_token", "per_token", "warps")
    }
    print(json.dumps({"made": asdict(made), "kernel": shown}), flush=True)


def answers(module: str, triton_folder: Path, ccs: list[int]) -> Iterator[tuple[Compiled, Kernel]]:
    done = subprocess.run(
        [sys.executable, "-m", f"benchmarks.kernels.{module}", *map(str, ccs)],
        cwd=PROJECT,
        capture_output=True,
        text=True,
        env=environment(triton_folder),
    )
    for line in filter(lambda line: line.startswith('{"made"'), done.stdout.splitlines()):
        made, kernel = json.loads(line).values()
        yield (
            Compiled(**made | {"loops": [Loop(**loop) for loop in made["loops"]]}),
            Kernel(function=lambda: None, signature={}, constants={}, **kernel),
        )
    if done.returncode:
        raise OSError((done.stderr.strip() or f"{module} ended").splitlines()[-1])


def reference(triton_folder: Path, ccs: list[int]) -> Iterator[tuple[Compiled, Kernel]]:
    """mamba-ssm's kernels on these architectures. Raises OSError where a compiler or the sources can't be had."""
    sources()
    yield from answers("reference_triton", triton_folder, ccs)
    installed("nvcc-13", *NVCC)
    yield from answers("reference", triton_folder, ccs)


def main(ccs: list[str]) -> None:
    folder = sources() / "csrc" / "selective_scan"
    nvcc = next(installed("nvcc-13", *NVCC).glob("nvidia/cu*"))
    for cc in map(int, ccs):
        for kernel, source in zip(KERNELS, SOURCES):
            cubin = compile_scan(source, cc, folder, nvcc)
            found = loops(cubin)
            (registers, stack) = resources(cubin)
            report(
                Compiled(
                    "mamba-ssm",
                    kernel.name,
                    cc,
                    "nvcc",
                    registers,
                    stack,
                    0,
                    count(kernel, found),
                    count(kernel, found, "special"),
                    found,
                ),
                kernel,
            )


if __name__ == "__main__":
    main(sys.argv[1:])
