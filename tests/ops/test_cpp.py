"""Tests mamba_fsdp.ops.cpp, which compiles and loads the C backends, also on machines without a usable compiler or
cache folder."""

import os
import subprocess
import sys

import pytest
import torch

from mamba_fsdp.errors import UserError
from mamba_fsdp.ops import cpp
from mamba_fsdp.ops.backends import Use, resolve_backends
from tests.support.processes import run_program, write_program

pytestmark = pytest.mark.usefixtures("fresh")


@pytest.fixture
def fresh(tmp_path, monkeypatch):
    """Sets an empty cache folder, and forgets the loaded library. Returns the folder of the test."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    cpp.library.cache_clear()
    yield tmp_path
    cpp.library.cache_clear()


needs_compiler = pytest.mark.skipif(bool(cpp.why_unavailable()), reason="no C compiler")
USES = {operator: [Use(operator, torch.float32, False)] for operator in ("conv", "scan")}


def assert_reference_because(reason):
    """Asserts that `auto` selects the reference backends because C can't be used, and that the message contains the
    reason."""
    choice = resolve_backends("auto", "cpu", USES)
    assert choice.backends == {"conv": "reference", "scan": "reference"}
    assert str(choice).startswith("reference: conv, scan; conv, scan not cpp: ")
    assert reason in str(choice) and "\n" not in str(choice)


OTHERWISE = 'case "$*" in *--version*) echo "$VERSION";; *)'
WRITES_JUNK = f'{OTHERWISE} while [ "$1" != -o ]; do shift; done; echo junk >"$2";; esac'


@pytest.mark.parametrize(
    "body, reason",
    [
        ("exit 3", "strange-cc fails: exit status 3"),
        (f'{OTHERWISE} echo "unknown flag" >&2; exit 1;; esac', "strange-cc fails: unknown flag"),
        (WRITES_JUNK, "can't be written to or loaded"),
    ],
    ids=["always fails", "knows no flag", "writes junk"],
)
def test_a_broken_compiler_leaves_the_reference_backends(fresh, monkeypatch, body, reason):
    compiler = write_program(fresh / "strange-cc", f"#!/bin/sh\n{body}\n")
    monkeypatch.setenv("CC", str(compiler))
    assert_reference_because(reason)
    with pytest.raises(UserError, match=f"conv can't be cpp on cpu.*{reason}.*kernels=auto"):
        resolve_backends("cpp", "cpu", USES)


def test_each_version_of_a_compiler_has_its_own_library(fresh, monkeypatch):
    """The path of the compiled library depends on the version of the compiler, because machines that share a cache
    folder can have different compilers."""
    compiler = write_program(fresh / "cc", f"#!/bin/sh\n{WRITES_JUNK}\n")
    monkeypatch.setenv("CC", str(compiler))
    reasons = []
    for version in ("1", "2"):
        monkeypatch.setenv("VERSION", version)
        reasons.append(cpp.why_unavailable())
    assert reasons[0] != reasons[1]


def test_no_compiler(monkeypatch):
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", "/nowhere")
    assert_reference_because("no C compiler")
    monkeypatch.setenv("CC", "/nowhere/cc")
    assert_reference_because("/nowhere/cc")


@needs_compiler
def test_a_cache_folder_that_cannot_be(fresh, monkeypatch):
    (fresh / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(fresh / "file"))
    assert_reference_because(str(fresh / "file"))


CHILD = """
import sys
import torch
import mamba_fsdp.model.lm, mamba_fsdp.ops.backends
from mamba_fsdp.ops import cpp
from mamba_fsdp.ops.scan import selective_scan
assert "mamba_fsdp.ops.fused" in sys.modules
assert not {"mamba_ssm", "causal_conv1d", "triton"} & set(sys.modules)
assert cpp.why_unavailable() is None
x = torch.ones(1, 40, 20)
one = torch.ones(20, 2)
print(selective_scan(x, x, -one, x[..., :2], x[..., :2], one[:, 0], x, one[:, 0], backend="cpp").sum().item())
libraries = {line.split()[-1] for line in open("/proc/self/maps") if "gomp" in line or "libomp" in line}
assert len(libraries) <= 1, libraries
"""


@needs_compiler
@pytest.mark.slow
def test_processes_that_start_at_once_compile_one_library(fresh, project):
    """Two processes that start with an empty cache folder load the same complete library, and leave no other files. A
    later process uses the same library.

    A process with this library does not load a second OpenMP runtime next to PyTorch's, or mamba_ssm, causal_conv1d
    or Triton.
    """
    children = [
        subprocess.Popen(
            [sys.executable, "-c", CHILD],
            cwd=project,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for _ in range(2)
    ]
    outputs = [child.communicate() for child in children]
    assert all(child.returncode == 0 for child in children), outputs
    assert len({output for output, _ in outputs}) == 1
    (library,) = (fresh / "cache" / "mamba_fsdp").iterdir()
    before = library.stat()
    assert cpp.why_unavailable() is None
    assert library.stat().st_ino == before.st_ino


TUNED = """
import torch
from mamba_fsdp.ops import cpp

torch.set_num_threads(3)
denormals = torch.full((3 << 16,), 1e-310, dtype=torch.float64)
assert denormals.mul(0.5).all()  # starts the threads

def resident_mb():
    return int(open("/proc/self/statm").read().split()[1]) * 4096 >> 20

for device in ("cuda", "cpu"):
    cpp.tune_process(device)
    before = resident_mb()
    torch.ones(64 << 20, dtype=torch.uint8)
    kept = resident_mb() - before > 60
    print(cpp.flushes_denormals(), denormals.mul(0.5).count_nonzero().item(), kept)
"""


def test_only_a_process_that_trains_on_its_cpu_is_tuned(project):
    """tune_process("cpu") makes all threads treat denormal numbers as 0, and makes the process keep freed memory.
    tune_process("cuda") changes neither."""
    done = run_program(sys.executable, "-c", TUNED, cwd=project)
    assert done.stdout == "False 196608 False\nTrue 0 True\n", done.stderr
