"""The C backends' way from source to loaded library, also where the machine is against it."""

import os
import subprocess
import sys
import textwrap
import types

import pytest
import torch

from mamba_fsdp.errors import UserError
from mamba_fsdp.ops import cpp
from mamba_fsdp.ops.backends import Use, resolve_backends
from tests.support.processes import write_program

pytestmark = pytest.mark.usefixtures("fresh")


@pytest.fixture
def fresh(tmp_path, monkeypatch):
    """An empty cache folder, and nothing loaded yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    cpp.library.cache_clear()
    yield tmp_path
    cpp.library.cache_clear()


@pytest.fixture
def needs_compiler():
    reason = cpp.why_unavailable()
    if reason:
        pytest.skip(reason)


USES = {operator: [Use(operator, torch.float32, False)] for operator in ("conv", "scan")}


def assert_portable_because(reason):
    """Where there is no C, auto takes the reference backends and the log's line says why."""
    choice = resolve_backends("auto", "cpu", USES)
    assert choice.backends == {"conv": "reference", "scan": "reference"}
    assert str(choice).startswith("reference: conv, scan; conv, scan not cpp: ")
    assert reason in str(choice) and "\n" not in str(choice)


def write_compiler(folder, body):
    return str(write_program(folder / "strange-cc", f"#!/bin/sh\n{body}\n"))


@pytest.mark.parametrize(
    "body, said",
    [
        ("exit 3", "exit status 3"),
        ("echo 'disk on fire' >&2; exit 1", "disk on fire"),
        (
            'case "$*" in *--version*) echo 1;; *) echo "unknown flag" >&2; exit 1;; esac',
            "unknown flag",
        ),
        (
            'case "$*" in *--version*) echo 1;; *) while [ "$1" != -o ]; do shift; done; echo junk >"$2";; esac',
            "can't be written to or loaded",
        ),
    ],
    ids=["always fails", "says why", "knows no flag", "writes junk"],
)
def test_a_broken_compiler_means_portable_and_says_so(fresh, monkeypatch, body, said):
    monkeypatch.setenv("CC", write_compiler(fresh, body))
    assert_portable_because(said)
    with pytest.raises(
        UserError, match="kernels=cpp: conv can't be cpp on cpu.*kernels=auto"
    ) as refused:
        resolve_backends("cpp", "cpu", USES)
    assert said in str(refused.value)


def test_no_compiler(monkeypatch):
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", "/nowhere")
    assert_portable_because("no C compiler")
    monkeypatch.setenv("CC", "/nowhere/cc")
    assert_portable_because("/nowhere/cc")


@pytest.mark.slow
def test_a_cache_folder_that_cannot_be(fresh, monkeypatch, needs_compiler):
    cpp.library.cache_clear()
    (fresh / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(fresh / "file"))
    assert_portable_because(str(fresh / "file"))


def libraries(folder):
    return sorted((folder / "cache" / "mamba_fsdp").iterdir())


def test_compiled_once(fresh, monkeypatch, needs_compiler):
    """The second process finds the library of the first and needs no compiler run but for its version."""
    (path,) = libraries(fresh)
    written = path.stat().st_mtime_ns
    cpp.library.cache_clear()
    monkeypatch.setattr(cpp, "_compile", None)
    assert cpp.why_unavailable() is None
    assert libraries(fresh) == [path] and path.stat().st_mtime_ns == written


CHILD = """
    import torch
    from mamba_fsdp.ops import cpp
    from mamba_fsdp.ops.scan import selective_scan
    assert cpp.why_unavailable() is None
    x = torch.ones(1, 40, 20)
    one = torch.ones(20, 2)
    print(selective_scan(x, x, -one, x[..., :2], x[..., :2], one[:, 0], x, one[:, 0], backend="cpp").sum().item())
    libraries = {line.split()[-1] for line in open("/proc/self/maps") if "gomp" in line or "libomp" in line}
    assert len(libraries) <= 1, libraries
"""


def start_child(project, script=CHILD):
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script)],
        cwd=project,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


@pytest.mark.slow
def test_many_processes_at_once(fresh, project, needs_compiler):
    """Processes that all find an empty cache each end with the same whole library and nothing beside it, and none loads
    a second OpenMP runtime next to PyTorch's."""
    for path in libraries(fresh):
        path.unlink()
    children = [start_child(project) for _ in range(2)]
    outputs = [child.communicate() for child in children]
    assert all(child.returncode == 0 for child in children), outputs
    assert len({out for out, _ in outputs}) == 1
    assert len(libraries(fresh)) == 1


@pytest.mark.slow
def test_importing_operators_loads_no_cuda_library(project):
    child = start_child(
        project,
        """
        import sys
        import mamba_fsdp.model.lm, mamba_fsdp.ops.backends
        assert "mamba_fsdp.ops.fused" in sys.modules
        assert not {"mamba_ssm", "causal_conv1d", "triton"} & set(sys.modules)
    """,
    )
    _, errors = child.communicate()
    assert child.returncode == 0, errors


@pytest.mark.torch22
def test_only_a_process_that_trains_on_its_cpu_is_tuned(monkeypatch):
    """Beside a GPU, memory goes back to the system, and arithmetic stays as it is."""
    told = []
    monkeypatch.setattr(torch, "set_flush_denormal", told.append)
    library = types.SimpleNamespace(mallopt=lambda *what: told.append(what))
    monkeypatch.setattr(cpp.ctypes, "CDLL", lambda name: library)
    cpp.tune_process("cuda")
    assert told == []
    cpp.tune_process("cpu")
    assert told == [True, (-3, 1 << 30), (-1, 1 << 30)]
