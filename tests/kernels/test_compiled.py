"""Tests that every kernel compiles for several GPUs, and that the cost of its code is within bounds.

By default, each launch is compiled for one of six pairs of a Triton version and an architecture. KERNEL_GATES=all
tests/run.sh tests/kernels/test_compiled.py compiles all launches for all pairs. The compiled kernels are cached in a
folder next to the one of the Triton version.
"""

import json
import os
import subprocess
import sys
from typing import NamedTuple

import pytest

from benchmarks.kernels.compiler import Compiled, compile_part, environment
from benchmarks.kernels.install import TRITONS
from tests.support.triton_wheels import fetch

pytestmark = pytest.mark.slow
PAIRS = [("2.2.0", 80), ("2.2.0", 90), ("3.6.0", 90), ("3.6.0", 100), ("3.9.0", 86), ("3.9.0", 120)]
PARTS = len(PAIRS)
if os.environ.get("KERNEL_GATES") == "all":
    PAIRS = [(version, cc) for version, ccs in TRITONS.items() for cc in ccs]
    PARTS = 1
# {compute capability: KiB of shared memory that a block can use}. Source: NVIDIA's CUDA programming guide.
SHARED = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}


class Bounds(NamedTuple):
    """The largest accepted counts of a compiled launch, as benchmarks.kernels.compiler counts them."""

    instructions: float  # the number of instructions per element
    spills: int = 0  # instructions of the innermost loops that access the stack
    stack: int = 0  # the size of the stack in bytes


BOUNDS = {
    "conv walk": Bounds(22.5),
    "conv walk back": Bounds(47),
    "loss cross_entropy": Bounds(26),
    "norm norm": Bounds(34),
    "norm norm_back": Bounds(41.5, spills=8, stack=24),  # only sm_120 spills
    "scan sweep": Bounds(17, stack=32),
    "scan sweep local": Bounds(11),
    # The stack contains the values that pass from tile to tile, while the loop goes through a chunk.
    "scan backward": Bounds(47, spills=80, stack=700),
    "ssd add_up": Bounds(2.6),
    "ssd sweep": Bounds(149, spills=16, stack=64),
    "ssd sweep on sm_90": Bounds(92, spills=8, stack=32),  # 67 instructions with Triton 3
    "ssd sweep local": Bounds(43),
    "ssd sweep local on sm_90": Bounds(22),
    "ssd near": Bounds(48, stack=64),
    "ssd far": Bounds(112, spills=20, stack=96),
    "ssd finish": Bounds(14),
}
# {(Triton, d_state): bounds of the scan on sm_90}. Triton 2.2 can't compile more than 64 states, and few models have 128.
MANY_STATES = {
    ("2.2.0", 64): Bounds(52, spills=180, stack=640),
    ("3.6.0", 128): Bounds(115, spills=1000, stack=2400),
}
# Words in a launch's title that do not change its bounds.
VARIANTS = {"reverse", "cut", "documents"}


def complaints(made):
    """Returns a text for each bound that a compiled launch exceeds."""
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
    made = list(compile_part(fetch(version), cc, PAIRS.index((version, cc)) % PARTS, PARTS))
    assert made
    assert [f"{one.title}: {text}" for one in made for text in complaints(one)] == []


def run_with_triton(version, project, module, *arguments):
    """Runs a module of the project in a process with this version of Triton, and returns its output."""
    command = [sys.executable, "-m", module, *arguments]
    variables = environment(fetch(version))
    done = subprocess.run(command, cwd=project, env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("version, d_state", MANY_STATES)
def test_scans_of_many_states_compile(version, d_state, project):
    output = run_with_triton(version, project, "tests.support.scans", "90", str(d_state))
    made = [Compiled(**json.loads(line)) for line in output.splitlines()]
    assert len(made) == 4
    for one in made:
        assert not one.error
        found = Bounds(one.instructions, one.spills, one.stack)
        bounds = MANY_STATES[version, d_state]
        assert all(value <= most for value, most in zip(found, bounds)), (one.title, found)


def test_no_loop_of_a_kernel_loses_a_variable(project):
    """Triton 3's front end carries every variable that a loop of our kernels changes (tests/support/carries.py). The
    front end once did not carry the variable of the fourth tap of the convolution in float32."""
    report = json.loads(run_with_triton("3.6.0", project, "tests.support.carries"))
    assert report["toy"] == ["old"]
    assert report["launches"] > 30 and report["compared"] > 1000
    assert report["suspicious"] == []
