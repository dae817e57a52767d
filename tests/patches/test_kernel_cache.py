"""Kernels that one start compiled and rank 0 packed: the next start compiles nothing, whatever happened in between."""

import json
import os
import subprocess
import sys

import pytest

from config import resolve
from mamba_fsdp.ops import triton
from mamba_fsdp.parallel.world import World
from mamba_fsdp.train.kernel_cache import KernelCache
from tests.support.triton_wheels import NEWEST, with_class

KERNEL = """
import triton
import triton.language as tl

@triton.jit
def double(x, size, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x + at, 2 * tl.load(x + at, mask=at < size), mask=at < size)
"""
COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from kernel import double
compiled = []
triton.knobs.compilation.listener = lambda cache_hit, **_: compiled.append(not cache_hit)
for block in (64, 128):
    source = ASTSource(double, {"x": "*fp32", "size": "i32", "BLOCK": "constexpr"}, {(2,): block})
    triton.compile(source, target=GPUTarget("cuda", 90, 32))
print(sum(compiled), len(compiled))
"""


@pytest.fixture
def start(tmp_path, monkeypatch):
    """start(node) -> the cache of a start on that node's own disk, and what it says."""

    def begin(node, local_rank=0, **given):
        monkeypatch.setenv("KERNELS_ON_NODE", str(tmp_path / f"node{node}" / "kernels"))
        given = {"save_ckpt_path": tmp_path / "runs/a", "use_torch_compile": True, **given}
        settings, _ = resolve.resolve_settings(
            {name: str(value) for name, value in given.items()}, None, ()
        )
        world, said = World.alone(), []
        world.local_rank = local_rank
        cache = KernelCache(settings, world, said.append)
        cache.take()
        return cache, said

    return begin


def put(cache, name, text="code"):
    (cache.local / name).parent.mkdir(parents=True, exist_ok=True)
    (cache.local / name).write_text(text)


@pytest.mark.slow
def test_the_second_start_compiles_nothing(start, tmp_path):
    (tmp_path / "kernel.py").write_text(KERNEL)
    triton_here = with_class(NEWEST)

    def compilations(cache, rank):
        paths = os.pathsep.join([triton_here["PYTHONPATH"], str(tmp_path)])
        environment = {
            **os.environ,
            **triton_here,
            "PYTHONPATH": paths,
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "TRITON_CACHE_DIR": str(cache.local / "triton"),
            "TRITON_RANK0_SCOPE": "node",
        }
        done = subprocess.run(
            [sys.executable, "-c", COMPILE], env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.split()

    first, said = start(1)
    assert compilations(first, 0) == ["2", "2"] and "no files" in said[0]
    first.keep()
    second, said = start(2)
    assert compilations(second, 0) == compilations(second, 1) == ["0", "2"], said
    before = second.archive.stat().st_mtime_ns
    second.keep()
    assert second.archive.stat().st_mtime_ns == before, "nothing is new"


def test_what_is_kept_lies_beside_the_runs_by_stack_gpu_and_code(start, tmp_path):
    first, _ = start(1)
    put(first, "triton/a/kernel.cubin")
    first.keep()
    archives = list((tmp_path / "runs/.cache/triton").iterdir())
    assert archives == [first.archive] and first.archive.name.startswith("torch2")
    put(first, "inductor/b.py")
    first.keep()
    second, said = start(2, save_ckpt_path=tmp_path / "runs/b")
    assert (second.local / "inductor/b.py").read_text() == "code" and "2 files of kernels" in said[
        0
    ]
    other, _ = start(3, local_rank=1)
    assert not other.local.exists(), "one process of each node unpacks"


@pytest.mark.parametrize("given", [{"kernel_cache": "none"}, {"use_torch_compile": False}])
def test_nothing_is_kept_where_nothing_is_wanted(start, given):
    cache, said = start(1, **given)
    cache.keep()
    assert cache.local is None and not said


def test_a_packing_that_is_killed_leaves_the_archive_as_it_was(start, monkeypatch):
    first, _ = start(1)
    put(first, "triton/a")
    first.keep()
    put(first, "triton/b")
    with monkeypatch.context() as patched:
        patched.setattr("pathlib.Path.replace", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            first.keep()
    second, said = start(2)
    assert [path.name for path in second.local.rglob("*") if path.is_file()] == ["a"] and len(
        said
    ) == 1


@pytest.mark.parametrize("damage", [b"", b"no archive", "half", "flipped"])
def test_a_damaged_archive_is_said_in_one_line_and_made_anew(start, damage):
    first, _ = start(1)
    put(first, "triton/a", "code " * 1000)
    first.keep()
    whole = first.archive.read_bytes()
    place = whole.index(b"triton/a") + 15
    flipped = whole[:place] + bytes([whole[place] ^ 255]) + whole[place + 1 :]
    first.archive.write_bytes({"half": whole[:-40], "flipped": flipped}.get(damage, damage))
    second, said = start(2)
    assert (
        not second._files()
        and "can't unpack" in said[0]
        and "no files" in said[1]
        and len(said) == 2
    )
    put(second, "triton/a")
    second.keep()
    assert start(3)[0].kept == 1


def test_a_folder_that_cannot_be_written_costs_one_line(start, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    cache, said = start(1, kernel_cache=tmp_path / "file" / "folder")
    put(cache, "triton/a")
    cache.keep()
    assert "can't be kept" in said[-1] and "Not a directory" in said[-1] and len(said) == 2
    monkeypatch.setattr(triton, "tune", lambda run, path: None)
    cache.tune(lambda: None)
    assert "can't be kept" in said[2] and len(said) == 4


def test_sizes_are_timed_once_and_told(start, monkeypatch):
    timed = []
    monkeypatch.setattr(triton, "tuned", {})
    monkeypatch.setattr(triton, "tables", {"scan": {(8, 0): {"BLOCK": 16, "num_warps": 1}}})
    monkeypatch.setattr(
        triton, "_seconds", lambda run: timed.append(dict(triton.tuned["scan"])) or len(timed) % 3
    )
    first, said = start(1)
    first.tune(lambda: None)
    assert len(timed) == 4 and triton.tuned["scan"] == timed[2] and "as timed" in said[-1]
    (path,) = first.archive.parent.glob("*.json")
    assert json.loads(path.read_text()) == triton.tuned
    triton.tuned.clear()
    start(2)[0].tune(lambda: None)
    assert len(timed) == 4 and triton.tuned["scan"] == timed[2], (
        "a restart computes with the same sizes"
    )
    start(3, seq_length=64)[0].tune(lambda: None)
    assert len(timed) == 8, "other shapes are timed again"


def test_one_layer_of_each_kind_is_timed_at_the_shapes_of_the_run(monkeypatch):
    from mamba_fsdp.ops.backends import REFERENCE
    from mamba_fsdp.train import setup

    given = {
        "d_model": "16",
        "n_layer": "7",
        "layers": "2*mamba1,mamba2+mlp,mamba1",
        "headdim": "8",
        "vocab_size": "64",
        "seq_length": "16",
        "batch_size": "3",
    }
    settings, _ = resolve.resolve_settings(given, None, ())
    built, build_model = [], setup.build_model
    monkeypatch.setattr(
        setup, "build_model", lambda *words: built.append(build_model(*words)) or built[0]
    )
    run = setup.step_of_each_layer(settings, World.alone(), REFERENCE)
    seen = []
    built[0].module.register_forward_pre_hook(lambda module, given: seen.append(given[0].shape))
    run()
    run()
    kinds = [
        (type(block.mixer).__name__, block.mlp is not None)
        for block in built[0].module.backbone.layers
    ]
    assert kinds == [("Mamba1", False), ("Mamba2", True)] and seen == [(3, 16)] * 2
