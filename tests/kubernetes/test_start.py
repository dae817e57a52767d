"""The command of kubernetes/trainjob.yaml, run for real: processes of this machine stand for the nodes, with a rank each,
and find the variables that Trainer 2.3 sets for its policy `torch`."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from mamba_fsdp.launch import machine, node
from mamba_fsdp.launch.failures import Failure, first_failure
from mamba_fsdp.run import names
from mamba_fsdp.run.records import ELSEWHERE, write_status
from tests.kubernetes import manifests
from tests.support.corpora import write_store
from tests.support.ports import hold_port
from tests.support.processes import finish, wait_until
from tests.support.tiny import TINY, as_words

pytestmark = pytest.mark.torch22
GRACE_SECONDS = manifests.node_job()["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]


@pytest.fixture
def start_nodes(tmp_path, project):
    """start_nodes(*settings, nodes=2) -> their processes. /fsx of the manifest is tmp_path."""
    write_store(tmp_path / "data/mine", [range(1, 60)] * 99, vocab_size=64, eos=0, tokenizer="none")
    started = []
    port = hold_port()

    def start_node(number, nodes, settings):
        command, environment = manifests.node_of_trainjob()
        environment |= {
            "PET_NNODES": str(nodes),
            "PET_NODE_RANK": str(number),
            "PET_NPROC_PER_NODE": "1",
            "PET_MASTER_ADDR": "localhost",
            "PET_MASTER_PORT": str(port.getsockname()[1]),
        }
        words = [*manifests.expanded(command, environment), *settings]
        return subprocess.Popen(
            [word.replace("/fsx", str(tmp_path)) for word in words],
            cwd=project,
            env={
                **os.environ,
                **environment,
                "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin",
            },
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )

    def start(*settings, nodes=2):
        words = as_words(TINY | {"checkpoint_interval": 10**6, "global_batch_size": 4})
        now = [start_node(number, nodes, [*words, *settings]) for number in range(nodes)]
        started.extend(now)
        return now

    yield start
    port.close()
    for process in started:
        process.kill()


@pytest.mark.slow
def test_nodes_train_and_stop_with_a_checkpoint_and_resume(start_nodes, tmp_path):
    """One node is drained, say: all stop, and none with exit code 0, which would end a PyTorchJob as complete."""
    nodes = start_nodes("--num_steps=1000000")
    metrics = tmp_path / "runs/mine/metrics.jsonl"
    wait_until(lambda: metrics.exists() and metrics.read_text().count("\n") > 2)
    nodes[1].send_signal(signal.SIGTERM)
    codes = [node.wait(timeout=GRACE_SECONDS) for node in nodes]
    assert codes == [143, 143], nodes[0].stdout.read()
    (commit,) = (tmp_path / "runs/mine/checkpoints").glob("*/COMMIT")
    step = int(commit.parent.name.removeprefix("step_"))

    # Resuming needs no more nodes than the cluster then has. A file STOP is for the start before.
    (tmp_path / "runs/mine/STOP").touch()
    (process,) = start_nodes(f"--num_steps={step + 2}", nodes=1)
    code, said = finish(process)
    assert code == 0, said
    assert f"step {step}\n" in said.partition("resumes    from")[2] and "finished " in said


@pytest.mark.slow
def test_a_mistake_ends_the_node_with_2(start_nodes, tmp_path):
    (process,) = start_nodes("--num_steps=ten", nodes=1)
    code, said = finish(process)
    assert code == 2
    assert said.splitlines()[-1].startswith("error: num_steps=ten"), said
    assert list(tmp_path.glob("runs/mine/starts/none/*.json")), "for the other nodes"


def test_nodes_without_a_number_of_their_start_share_what_failed_first(tmp_path, capsys):
    folder = tmp_path / names.STARTS / node.NO_ID
    failure = Failure("a", 3, exit_code=74, was_killed=False, time=2.0, reason="error: no more")
    node.leave(folder / "a.json", failure.__dict__)
    assert first_failure(folder) == failure
    outcome = node.outcome_of(tmp_path, folder, failure, has_own_words=False)
    assert node.print_outcome(outcome) == 74
    assert capsys.readouterr().err == "rank 3 on a failed first.\nerror: no more\n"
    (tmp_path / "STOP").touch()
    outcome = node.outcome_of(tmp_path, folder, failure, has_own_words=False)
    assert node.print_outcome(outcome) == 2, "no start may forget STOP"
    assert "not started again, since the file STOP asked" in capsys.readouterr().err


@pytest.mark.parametrize(
    "status, reason, expected",
    [
        ("stopped", ELSEWHERE, 143),
        ("stopped", "SIGTERM", 143),
        ("stopped", "STOP file", 0),
        ("finished", "", 0),
    ],
)
def test_a_node_is_done_if_the_run_is_over_or_a_file_stopped_it(tmp_path, status, reason, expected):
    write_status(tmp_path, status, 3, reason)
    folder = tmp_path / names.STARTS / node.NO_ID
    outcome = node.outcome_of(tmp_path, folder, None, has_own_words=False)
    assert node.print_outcome(outcome) == expected
    assert not folder.exists(), "nothing failed"


@pytest.mark.parametrize("own, trainers, expected", [("", "3", 3), ("", "auto", 1), ("2", "3", 2)])
def test_ranks_of_a_node(monkeypatch, own, trainers, expected):
    """As numProcPerNode of a TrainJob says, which is `auto` on a node with GPUs."""
    monkeypatch.setenv("PROCESSES_PER_NODE", own)
    monkeypatch.setenv("PET_NPROC_PER_NODE", trainers)
    monkeypatch.setattr(machine, "assigned_gpus", int)
    assert machine.processes_per_node() == expected


def test_an_exit_code_that_pytorchjob_starts_again(monkeypatch, capsys):
    """From 128 on; the smaller ones of accidents and of storage become one that is set. A mistake stays one."""
    codes = (0, 1, 2, 74, 137, 143)
    ends = iter([*codes, *codes])
    monkeypatch.setattr(node, "main", lambda *_: next(ends))
    assert [node.start(["run"]) for _ in codes] == list(codes)
    _, environment = manifests.nodes_of_pytorchjob()[0]
    monkeypatch.setenv("RESTART_EXIT_CODE", environment["RESTART_EXIT_CODE"])
    assert [node.start(["run"]) for _ in codes] == [0, 129, 2, 129, 137, 143]

    def fail(*_):
        raise OSError("no more\nof it")

    monkeypatch.setattr(node, "main", fail)
    assert node.start(["run"]) == 129, "an accident of the launcher itself"
    assert capsys.readouterr().err.endswith(" failed: OSError: no more\n")
    monkeypatch.setenv("RESTART_EXIT_CODE", "")
    assert node.start(["run"]) == 2
    assert capsys.readouterr().err.endswith("_CODE=: expected 1 to 255\n")
