"""Tests Rank0CacheManager with many ranks on one Triton cache: no rank waits, no rank loses a file, and only rank 0
writes to the shared folder."""

import json
import subprocess

import pytest

from tests.patches.conftest import finish
from tests.support.triton_rank import author_of

KERNELS = [f"kernel{i}" for i in range(4)]


def pose(rank, ranks_per_node=3, **plan):
    """Returns the plan of a rank. Ranks with the same place on different nodes have equal pids and seeds, as on nodes
    that were started in the same way."""
    return {"author": f"rank{rank}", "pid": 100 + rank % ranks_per_node, "seed": 0, **plan}


def authors(files):
    return {author_of(path) for path in files if not path.name.startswith("__grp__")}


@pytest.mark.slow
def test_only_rank_0_publishes_and_every_rank_has_all_it_compiled(triton, cluster):
    """Four ranks on two nodes can compile the same kernels simultaneously, in different orders. All succeed, and only
    the files of rank 0 are shared."""
    together = cluster.gate(4)
    ranks = []
    for i in range(4):
        plan = pose(i, 2, kernels=KERNELS[i:] + KERNELS[:i], size=20_000, **together)
        ranks.append(cluster.start(triton, plan, RANK=str(i)))
    cluster.finish(*ranks)
    shared = cluster.files()
    assert authors(shared) == {"rank0"}
    assert len(shared) == 13 * len(KERNELS)
    assert not [path for path in shared if path.name.endswith(".tmp")]
    assert cluster.files("private") == [], "private folders are removed at exit"
    again = cluster.run(triton, pose(4, kernels=KERNELS), RANK="4")
    assert set(again.values()) == {"hit"}, "what rank 0 published serves everyone"


@pytest.mark.parametrize("write", [1, 13])
def test_rank_0_killed_in_mid_write(patched, cluster, write):
    """If rank 0 is killed during any write, no incomplete file is visible and other ranks continue. The next start of
    rank 0 completes the cache."""
    together = {"kernels": ["k"], "size": 50_000, **cluster.gate(3)}
    ranks = [cluster.start(patched, pose(0, die_at=write, **together), RANK="0")]
    for i in (1, 2):
        ranks.append(cluster.start(patched, pose(i, **together), RANK=str(i)))
    assert ranks[0].wait(timeout=400) == -9
    cluster.finish(*ranks[1:])
    assert authors(path for path in cluster.files() if not path.name.endswith(".tmp")) <= {"rank0"}
    assert cluster.run(patched, pose(0, kernels=["k"]), RANK="0") == {"k": "compiled"}
    assert cluster.run(patched, pose(2, kernels=["k"]), RANK="2") == {"k": "hit"}


READ_ONLY = 'mount --bind "$HOME" "$HOME"; mount -o remount,bind,ro "$HOME"; "$@"'


def test_read_only_folder(patched, cluster):
    """A rank can read a cache in a read-only folder. It compiles missing kernels privately, and rank 0 prints a
    warning."""
    namespace = ["unshare", "--user", "--map-root-user", "--mount"]
    if subprocess.run([*namespace, "true"], capture_output=True).returncode:
        pytest.skip("mount namespaces are not allowed here, so no folder can be made read-only")
    cluster.run(patched, pose(0, kernels=["old"]), RANK="0")
    before = cluster.files()
    wrapper = [*namespace, "sh", "-ec", READ_ONLY, "sh"]
    plan = pose(0, kernels=["old", "new", "newer"])
    # Rank 0 prints one warning for the cache folder and one for the dump folder.
    for rank, warnings in (("0", 2), ("1", 0)):
        output, errors = finish(cluster.start(patched, plan, wrapper=wrapper, RANK=rank))
        assert json.loads(output) == {"old": "hit", "new": "compiled", "newer": "compiled"}
        assert errors.count("can't be written (Read-only file system)") == warnings
    assert cluster.files() == before and cluster.files("private") == []


def test_corrupt_group_file(patched, cluster):
    """An invalid group file is ignored, and replaced by the next compilation of rank 0. Files whose content would not
    change are not written again, because other processes can have mapped them into memory."""
    cluster.run(patched, pose(0, kernels=["k"]), RANK="0")
    (group,) = [path for path in cluster.files() if path.name.startswith("__grp__")]
    inodes = {path: path.stat().st_ino for path in cluster.files() if path != group}
    for garbage in (b"", b"null", b"\xff\xfe", b'{"child_paths": {}}', b'{"child_paths": [[]]}'):
        group.write_bytes(garbage)
        assert cluster.run(patched, pose(1, kernels=["k"]), RANK="1") == {"k": "compiled"}, garbage
    assert cluster.run(patched, pose(0, kernels=["k"]), RANK="0") == {"k": "compiled"}
    assert inodes == {path: path.stat().st_ino for path in inodes}
    assert cluster.run(patched, pose(1, kernels=["k"]), RANK="1") == {"k": "hit"}


PUBLISHES = {  # {environment of a process: whether it writes to the shared folder}
    "": True,
    "RANK=0": True,
    "RANK=1": False,
    "SLURM_PROCID=1": False,
    "RANK=0 SLURM_PROCID=1": True,  # srun has started torchrun, whose rank is used
    "RANK=2 LOCAL_RANK=0": False,
    "RANK=2 LOCAL_RANK=0 TRITON_RANK0_SCOPE=node": True,
    "SLURM_PROCID=2 SLURM_LOCALID=0 TRITON_RANK0_SCOPE=node": True,
    "RANK=0 LOCAL_RANK=1 TRITON_RANK0_SCOPE=node": False,
    # If the local rank is unknown, no rank writes. Otherwise several ranks of a node could.
    "RANK=3 TRITON_RANK0_SCOPE=node": False,
}


@pytest.mark.parametrize("environment", PUBLISHES)
def test_the_environment_decides_which_rank_writes(patched, cluster, environment):
    """Only the environment variables of the launcher determine which rank writes to the shared folder."""
    variables = dict(word.split("=") for word in environment.split())
    cluster.run(patched, pose(0, kernels=["k"]), **variables)
    assert bool(cluster.files()) == PUBLISHES[environment]


def test_unknown_scope_is_refused(patched, cluster):
    """An unknown value of TRITON_RANK0_SCOPE is an error that lists the known values."""
    rank = cluster.start(patched, pose(0, kernels=["k"]), TRITON_RANK0_SCOPE="nodes")
    assert "set it to global" in rank.communicate()[1]
