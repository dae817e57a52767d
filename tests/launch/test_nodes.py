"""Tests mamba_fsdp.launch.nodes, node_watch and run.node_record: the selection of the nodes that train, the detection
of lost nodes, and their record."""

import json
import os
import socket
import subprocess
import sys
import time

import pytest

from mamba_fsdp.launch import node_watch
from mamba_fsdp.launch.nodes import Batch, NodePool
from mamba_fsdp.launch.starts import RankRestarts
from mamba_fsdp.run.names import NODES
from mamba_fsdp.run.node_record import add_record, read_records, sick_nodes
from tests.launch.test_decision import CRASHED, ended
from tests.support.processes import wait_until, write_program

NODES_OF_JOB = ["n1", "n2", "n3", "n4"]
# {(spare nodes, minimal number of nodes, lost nodes, nodes that were sick in an earlier start): the nodes that train}
CHOICES = {
    (0, 0, "", ""): "n1 n2 n3 n4",
    (0, 0, "n2", ""): "",
    (1, 0, "", ""): "n1 n2 n3",
    (1, 0, "", "n1"): "n2 n3 n4",
    (1, 0, "n2", ""): "n1 n3 n4",
    (1, 0, "n2 n3", ""): "",
    (1, 2, "n2 n3", ""): "n1 n4",
    (0, 1, "n2", ""): "n1 n3 n4",
    (0, 1, "n1 n2 n3", "n4"): "n4",
}


@pytest.mark.parametrize("case", CHOICES)
def test_which_nodes_train(case):
    spare, least, lost, suspected = case
    pool = NodePool(NODES_OF_JOB, spare, least)
    pool.left_out = dict.fromkeys(lost.split(), "lost")
    pool.suspected = dict.fromkeys(suspected.split(), "sick")
    assert pool.choose() == CHOICES[case].split()


@pytest.mark.parametrize(
    "batch, remaining, count",
    [
        (Batch(0, 6, 1), ["n1", "n2", "n3"], 3),  # 6 ranks can divide the 48 samples of 8 ranks
        (Batch(64, 1, 1), ["n1", "n2", "n3"], 2),  # 6 ranks can't divide 64 samples
        (Batch(63, 1, 1), ["n1", "n2"], 0),
        (Batch(64, 1, 4), ["n1", "n2", "n3"], 2),  # 6 ranks can't be divided into groups of 4
    ],
)
def test_the_global_batch_is_shared_by_the_largest_number_of_nodes_that_can(
    batch, remaining, count
):
    pool = NodePool(NODES_OF_JOB, 0, 1)
    pool.left_out = {node: "lost" for node in NODES_OF_JOB if node not in remaining}
    assert len(pool.choose(batch, 2)) == count


def test_a_node_whose_rank_fails_first_twice_from_one_checkpoint_is_sick():
    outcomes = [CRASHED._replace(node="n2")] * 2
    starts = RankRestarts(lambda: 1, lambda code: ended(outcome=outcomes.pop()))
    starts.run()
    assert not outcomes and starts.is_sick("n2") and not starts.is_sick("n1")


class Guard:
    """A guard's connection to a NodeWatch."""

    def __init__(self, watch, node):
        self.socket = socket.create_connection(("127.0.0.1", int(watch.address[1])))
        self.socket.sendall(f"{watch.token} {node}\n".encode())
        wait_until(lambda: node in watch.addresses)


@pytest.fixture
def watch(monkeypatch):
    """Provides a NodeWatch of two nodes. Its attribute `reachable` determines whether the nodes respond. Its attribute
    `losses` is the list of the nodes that it has reported as lost."""
    monkeypatch.setattr(node_watch, "RECHECK_SECONDS", 0.05)
    watch = node_watch.NodeWatch(["n1", "n2"], lambda node: watch.losses.append(node))
    watch.losses = []
    watch.reachable = True
    monkeypatch.setattr(node_watch, "is_reachable", lambda node, port: watch.reachable)
    watch.start()
    yield watch
    watch.stop()


def test_a_guard_that_ends_is_no_loss_until_its_node_no_longer_answers(watch):
    guards = [Guard(watch, node) for node in ("n1", "n2")]
    guards[1].socket.close()
    time.sleep(0.3)
    watch.wait_for_confirmations()
    assert watch.losses == []
    watch.reachable = False
    wait_until(lambda: watch.losses)
    assert watch.losses == ["n2"] and watch.lost["n2"] == pytest.approx(time.time(), abs=60)


def test_a_stranger_is_no_guard(watch):
    stranger = socket.create_connection(("127.0.0.1", int(watch.address[1])))
    stranger.sendall(b"guess n1\n")
    assert stranger.recv(1) == b"" and not watch.addresses


@pytest.mark.parametrize("is_killed", [False, True])
def test_a_guard_ends_with_its_job_and_removes_what_a_killed_launcher_left(
    project, tmp_path, monkeypatch, is_killed
):
    """A guard exits when its job ends, and removes the temporary folders of launchers that no longer exist. It removes
    the folder of the start only if the job's program was killed."""
    folder = tmp_path / "starts/77.0"
    folder.mkdir(parents=True)
    ended_process = subprocess.Popen(["true"])
    ended_process.wait()
    for pid in (ended_process.pid, os.getpid()):
        (tmp_path / f"mamba-train-{pid}-abc").mkdir()
    answers = (
        "case $1$2 in showhostnames) echo n1 ;; *) echo JobState=COMPLETING ExitCode=0:9 ;; esac"
    )
    write_program(tmp_path / "scontrol", f"#!/bin/sh\n{answers}\n")
    write_program(tmp_path / "squeue", "#!/bin/sh\necho COMPLETING\n")
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n1")
    watch = node_watch.NodeWatch(["n1"], print)
    watch.remove_if_killed(str(folder))
    monkeypatch.setenv(node_watch.TOKEN, watch.token)
    monkeypatch.setenv("SLURMD_NODENAME", "n1")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    program = [sys.executable, "-I", project / "mamba_fsdp/launch/node_guard.py", "77.0"]
    guard = subprocess.Popen([*program, "127.0.0.1", watch.address[1]], stdin=subprocess.PIPE)
    watch.start()
    wait_until(lambda: "n1" in watch.addresses)
    if is_killed:
        wait_until(lambda: "n1" in watch.connected)
        # Unlike a job's program that was killed, this process continues, and would try to reach the node.
        watch.is_over = True
        watch.connected["n1"].shutdown(socket.SHUT_RDWR)
    else:
        watch.stop()
    assert guard.wait(60) == 0
    assert folder.exists() != is_killed
    assert [path.name for path in tmp_path.glob("mamba-*")] == [f"mamba-train-{os.getpid()}-abc"]


def test_a_node_is_suspected_for_a_day_and_until_its_line_is_deleted(tmp_path):
    now = time.time()
    for node, kind, age in (("n1", "sick", 10), ("n2", "lost", 10), ("n3", "sick", 90000)):
        add_record(str(tmp_path), "77", node, kind, "a reason", now - age)
    with open(tmp_path / NODES, "a") as file:
        file.write("no JSON\n" + json.dumps({"node": "n4", "kind": "sick"}) + "\n")
    assert [record["node"] for record in read_records(str(tmp_path))] == ["n1", "n2", "n3"]
    assert sick_nodes(str(tmp_path)) == {"n1": "a reason"}
    (tmp_path / NODES).unlink()
    assert sick_nodes(str(tmp_path)) == {}
