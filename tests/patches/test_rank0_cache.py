"""Many ranks on one Triton cache: nobody waits, nobody loses a file, nobody but rank 0 writes into the shared
folder."""

import json
import subprocess

import pytest

from tests.patches.conftest import said_by
from tests.support.triton_rank import author_of

KERNELS = [f"kernel{i}" for i in range(4)]


def pose(rank, ranks_per_node=3, **plan):
    """A plan whose process poses as one of several nodes that started alike: equal pids and equal seeds on each
    node."""
    return {"author": f"rank{rank}", "pid": 100 + rank % ranks_per_node, "seed": 0, **plan}


def authors(files):
    return {author_of(path) for path in files if not path.name.startswith("__grp__")}


@pytest.mark.slow
def test_only_rank_0_publishes_and_every_rank_has_all_it_compiled(triton, cluster):
    """Four ranks of two nodes compile the same kernels at once, in different orders: all end well, only rank 0's
    files are shared."""
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
    """Killed at any write, rank 0 leaves nothing torn: the others go on, and its next start completes the cache."""
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
    """A read-only cache still serves what it holds; the rest is compiled privately, by rank 0 too, with a warning."""
    namespace = ["unshare", "--user", "--map-root-user", "--mount"]
    if subprocess.run([*namespace, "true"], capture_output=True).returncode:
        pytest.skip("mount namespaces are not allowed here, so no folder can be made read-only")
    cluster.run(patched, pose(0, kernels=["old"]), RANK="0")
    before = cluster.files()
    wrapper = [*namespace, "sh", "-ec", READ_ONLY, "sh"]
    plan = pose(0, kernels=["old", "new", "newer"])
    for rank, warnings in (("0", 2), ("1", 0)):  # once for cache, once for dump
        output, errors = said_by(cluster.start(patched, plan, wrapper=wrapper, RANK=rank))
        assert json.loads(output) == {"old": "hit", "new": "compiled", "newer": "compiled"}
        assert errors.count("can't be written (Read-only file system)") == warnings
    assert cluster.files() == before and cluster.files("private") == []


def test_corrupt_group_file(patched, cluster):
    """A group file that is no group counts as none, and rank 0's next compilation mends it. Files of the same content stay
    as they are: others may have them mapped."""
    cluster.run(patched, pose(0, kernels=["k"]), RANK="0")
    (group,) = [path for path in cluster.files() if path.name.startswith("__grp__")]
    inodes = {path: path.stat().st_ino for path in cluster.files() if path != group}
    for garbage in (b"", b"null", b"\xff\xfe", b'{"child_paths": {}}', b'{"child_paths": [[]]}'):
        group.write_bytes(garbage)
        assert cluster.run(patched, pose(1, kernels=["k"]), RANK="1") == {"k": "compiled"}, garbage
    assert cluster.run(patched, pose(0, kernels=["k"]), RANK="0") == {"k": "compiled"}
    assert inodes == {path: path.stat().st_ino for path in inodes}
    assert cluster.run(patched, pose(1, kernels=["k"]), RANK="1") == {"k": "hit"}


PUBLISHES = {  # a process's environment: whether it writes into the shared folder
    "": True,
    "RANK=0": True,
    "RANK=1": False,
    "SLURM_PROCID=1": False,
    "RANK=0 SLURM_PROCID=1": True,  # torchrun started by srun: torchrun's rank counts
    "RANK=2 LOCAL_RANK=0": False,
    "RANK=2 LOCAL_RANK=0 TRITON_RANK0_SCOPE=node": True,
    "SLURM_PROCID=2 SLURM_LOCALID=0 TRITON_RANK0_SCOPE=node": True,
    "RANK=0 LOCAL_RANK=1 TRITON_RANK0_SCOPE=node": False,
    "RANK=3 TRITON_RANK0_SCOPE=node": False,  # no local rank known: rather no writer than two
}


@pytest.mark.parametrize("environment", PUBLISHES)
def test_the_environment_says_who_writes(patched, cluster, environment):
    """The writer is known from the launcher's variables alone, at the first put."""
    variables = dict(word.split("=") for word in environment.split())
    cluster.run(patched, pose(0, kernels=["k"]), **variables)
    assert bool(cluster.files()) == PUBLISHES[environment]


def test_unknown_scope_is_refused(patched, cluster):
    """A misspelt scope is an error that names the allowed ones, not a silent choice."""
    rank = cluster.start(patched, pose(0, kernels=["k"]), TRITON_RANK0_SCOPE="nodes")
    assert "set it to global" in rank.communicate()[1]
