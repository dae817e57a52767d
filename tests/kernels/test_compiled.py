"""Every kernel that a layer launches can be compiled for several GPUs, within limits for the cost of its code. No GPU
is needed.

By default, each launch is compiled for one of six pairs of Triton and architecture. KERNEL_GATES=all tests/run.sh
tests/kernels/test_compiled.py compiles all launches for all pairs. The compiled code is kept in a cache next to
Triton.
"""

import json
import os
import subprocess
import sys
from typing import NamedTuple

import pytest

from benchmarks.kernels.compiler import Compiled, compile_part, environment
from benchmarks.kernels.install import TRITONS, triton_folder

pytestmark = pytest.mark.slow
PAIRS = [("2.2.0", 80), ("2.2.0", 90), ("3.6.0", 90), ("3.6.0", 100), ("3.9.0", 86), ("3.9.0", 120)]
PARTS = len(PAIRS)
if os.environ.get("KERNEL_GATES") == "all":
    PAIRS = [(version, cc) for version, ccs in TRITONS.items() for cc in ccs]
    PARTS = 1
# {compute capability: KiB of shared memory per block} (NVIDIA's CUDA programming guide).
SHARED = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}


class Bounds(NamedTuple):
    instructions: float  # instructions of a thread per element
    spills: int = 0  # instructions of innermost loops that read or write the stack
    stack: int = 0  # bytes


BOUNDS = {
    "conv walk": Bounds(22.5),
    "conv walk back": Bounds(47),
    "loss cross_entropy": Bounds(26),
    "norm norm": Bounds(34),
    "norm norm_back": Bounds(41.5, spills=8, stack=24),  # spills only on sm_120
    "scan sweep": Bounds(17, stack=32),
    "scan sweep local": Bounds(11),
    # Values that are needed for the next tile are on the stack while a chunk is processed.
    "scan backward": Bounds(47, spills=80, stack=700),
    "ssd add_up": Bounds(2.6),
    "ssd sweep": Bounds(149, spills=16, stack=64),
    "ssd sweep on sm_90": Bounds(92, spills=8, stack=32),  # 67 on Triton 3
    "ssd sweep local": Bounds(43),
    "ssd sweep local on sm_90": Bounds(22),
    "ssd near": Bounds(48, stack=64),
    "ssd far": Bounds(112, spills=20, stack=96),
    "ssd finish": Bounds(14),
}
# Numbers of states for the scan on sm_90: the largest that Triton 2.2 can compile, and 128, which few models have.
MANY_STATES = {
    ("2.2.0", 64): Bounds(52, spills=180, stack=640),
    ("3.6.0", 128): Bounds(115, spills=1000, stack=2400),
}
VARIANTS = {"reverse", "cut", "documents"}  # variants that do not have their own bounds


def complaints(made):
    """Returns a message for each limit that the code of a launch exceeds."""
    if made.error:
        return [made.error]
    title = " ".join(word for word in made.title.split() if word not in VARIANTS)
    bounds = BOUNDS.get(f"{title} on sm_{made.cc}", BOUNDS[title])
    found = {name: getattr(made, name) for name in bounds._fields}
    broken = [f"{name} {found[name]:.6g}" for name in found if found[name] > getattr(bounds, name)]
    if made.shared > SHARED[made.cc] * 1024:
        broken.append(f"shared {made.shared}")
    if made.cc >= 100 and made.copies_ahead:
        broken.append("asynchronous copies, which have given wrong results there")
    return broken


@pytest.mark.parametrize("version, cc", PAIRS)
def test_every_kernel_keeps_its_bounds(version, cc):
    try:
        folder = triton_folder(version)
    except OSError as why:
        pytest.skip(str(why))
    made = list(compile_part(folder, cc, PAIRS.index((version, cc)) % PARTS, PARTS))
    assert made
    assert [f"{one.title}: {said}" for one in made for said in complaints(one)] == []


@pytest.mark.parametrize("version, d_state", MANY_STATES)
def test_scans_of_many_states_compile(version, d_state, project):
    try:
        folder = triton_folder(version)
    except OSError as why:
        pytest.skip(str(why))
    command = [sys.executable, "-m", "tests.support.scans", "90", str(d_state)]
    done = subprocess.run(
        command, env=environment(folder), cwd=project, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    made = [Compiled(**json.loads(line)) for line in done.stdout.splitlines()]
    assert len(made) == 4
    for one in made:
        assert not one.error
        found = Bounds(one.instructions, one.spills, one.stack)
        bounds = MANY_STATES[version, d_state]
        assert all(value <= most for value, most in zip(found, bounds)), (one.title, found)


def test_no_loop_of_a_kernel_loses_a_variable(project):
    """This is an error of Triton 3's front end, see tests/support/carries.py. Because of it, the convolution in
    float32 once lost its fourth tap."""
    try:
        folder = triton_folder("3.6.0")
    except OSError as why:
        pytest.skip(str(why))
    command = [sys.executable, "-m", "tests.support.carries"]
    done = subprocess.run(
        command, env=environment(folder), cwd=project, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["toy"] == ["old"]
    assert report["launches"] > 30 and report["compared"] > 1000
    assert report["suspicious"] == []
