"""mamba_fsdp.launch.node: how the ranks of a node end and start again, and what they find around them."""

import json
import os
import re
import resource
import signal
import subprocess
import threading
from dataclasses import asdict, replace

import pytest
from torch.distributed import DistNetworkError

from mamba_fsdp.launch import agent, node
from mamba_fsdp.launch.decision import Outcome
from mamba_fsdp.launch.failures import Failure, first_failure
from mamba_fsdp.launch.machine import node_name, set_environment
from mamba_fsdp.run import names
from mamba_fsdp.run.records import ELSEWHERE, write_status
from tests.support.processes import finish, wait_until
from tests.support.projects import FAKE_TRAINING, FOR_EVER, make_project, make_venv, starts

ALONE = ["--standalone"]
STARTS_FOR_EVER = """
import os, signal, time
signal.pthread_sigmask(signal.SIG_SETMASK, ())
open(f"started-{os.environ['RANK']}", "w")
time.sleep(600)
"""

SAYS_WHEN_IT_LOOKS = """
from torch.distributed.elastic.rendezvous import c10d_rendezvous_backend
connect = c10d_rendezvous_backend.TCPStore
def say_and_connect(*given, **named):
    open("looks", "w").close()
    return connect(*given, **named)
c10d_rendezvous_backend.TCPStore = say_and_connect
"""
pytestmark = pytest.mark.torch22


@pytest.fixture
def start_node(tmp_path, monkeypatch):
    """start_node(*words, training=FAKE_TRAINING, before="", **environment) -> (process, project folder). before: what
    the launcher runs first."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    started = []

    def start(*words, training=FAKE_TRAINING, before="", **environment):
        project = make_project(tmp_path / "project", training=training)
        script = project / "mamba_fsdp/launch/node.py"
        script.write_text(before + script.read_text())
        make_venv(project)
        command = [project / ".venv/bin/python", "-m", "mamba_fsdp.launch.node", "run", *words]
        command += ["training.py", "--save_ckpt_path=run", FOR_EVER]
        started.append(
            subprocess.Popen(
                command,
                env={**os.environ, **environment},
                cwd=project,
                text=True,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )
        )
        return started[-1], project

    yield start
    for process in started:
        process.kill()


@pytest.mark.slow
def test_ranks_that_are_asked_to_stop_have_the_time_they_need(start_node):
    """By itself torchrun kills them after 30 s, and SIGUSR1 ends it at once."""
    environment = {"PROCESSES_PER_NODE": "2", "FAKE_COMMIT_SECONDS": "1"}
    process, project = start_node(*ALONE, **environment)
    wait_until(lambda: len(starts(project / "run")) == 2)
    process.send_signal(signal.SIGUSR1)
    wait_until(lambda: '"stopped"' in (project / "run/status.json").read_text())
    process.send_signal(signal.SIGTERM)  # more of them change nothing
    code, output = finish(process)
    assert code == 128 + signal.SIGUSR1 and "Traceback" not in output
    assert list(project.glob("run/checkpoints/step_*/COMMIT"))
    many = [resource.getrlimit(resource.RLIMIT_NOFILE)[1]] * 2
    assert starts(project / "run")[0]["open_files"] == many, "many nodes need them"


@pytest.mark.slow
def test_ranks_that_only_start_end_at_once_and_count_as_stopped(start_node):
    process, project = start_node(*ALONE, training=STARTS_FOR_EVER, PROCESSES_PER_NODE="2")
    wait_until(lambda: len(list(project.glob("started-*"))) == 2)
    (project / "run").mkdir(exist_ok=True)
    (project / "run/status.json").write_text('{"status": "running", "step": 1}')
    process.send_signal(signal.SIGTERM)
    assert finish(process) == (143, "loading    PyTorch\n")
    assert '"failed"' in (project / "run/status.json").read_text(), "nothing runs any longer"


@pytest.mark.slow
def test_sigterm_while_it_looks_for_other_nodes_is_quiet(start_node):
    """Nobody is there: it keeps trying."""
    words = ["--nnodes=1", "--rdzv-endpoint=192.0.2.1:29400", "--rdzv-id=1"]
    process, project = start_node(*words, before=SAYS_WHEN_IT_LOOKS)
    wait_until((project / "looks").exists)
    process.send_signal(signal.SIGTERM)
    assert finish(process) in [(-signal.SIGTERM, ""), (143, "")]


@pytest.mark.slow
def test_a_node_that_never_meets_the_first_one_says_so(start_node):
    """As in Kubernetes, where the first node has a fixed number."""
    words = ["--nnodes=2", "--node-rank=1", "--rdzv-backend=static", "--rdzv-conf=timeout=1"]
    process, _ = start_node(*words, "--master-addr=127.0.0.1", "--master-port=1")
    code, output = finish(process)
    last = output.splitlines()[-1]
    assert code == 1 and "could not meet the other nodes, or has lost the first." in last, output
    assert "Traceback" not in output, "torch prints lines of its own"


FAILURE = Failure("a", rank=3, exit_code=1, was_killed=False, time=2.0, reason="Error: no more")


@pytest.mark.parametrize("name", ["77.0", node.NO_ID])
def test_what_an_earlier_start_has_left_is_forgotten(tmp_path, capsys, name):
    """With a number: Slurm has started the step again, for a node that went, because of which others failed. Without one,
    any start may have left it, also one of another version."""
    folder = tmp_path / name
    folder.mkdir()
    for left in ("a.json", names.OUTCOME, names.RESOLVED):
        (folder / left).write_text('{"of": "another version"}')
    node.forget_earlier_start(folder)
    replaced = "" if name == node.NO_ID else "restarts   the ranks after the loss of a node\n"
    assert capsys.readouterr().out == replaced
    stays = [] if name == node.NO_ID else [names.RESOLVED]
    assert [path.name for path in folder.glob("*")] == stays
    node.forget_earlier_start(folder)
    assert not capsys.readouterr().out


def test_the_outcome_names_the_rank_that_failed_first(tmp_path, capsys):
    """A run that was asked to stop has stopped, whatever became of its ranks. What can't be put on record is printed."""
    text = "rank 3 on a failed first.\nError: no more\n"
    for status in ("unknown", "stopped"):
        outcome = node.outcome_of(tmp_path, tmp_path / "77.0", FAILURE, has_own_words=False)
        stop_file = status == "stopped"
        assert outcome == Outcome(status, 1, "rank 3 on a: Error: no more", stop_file, text)
        (tmp_path / "STOP").touch()
    assert node.publish_outcome(tmp_path, outcome, FAILURE) == 1
    assert Outcome(**json.loads((tmp_path / names.OUTCOME).read_text())) == outcome
    nowhere = tmp_path / "STOP/is a file"
    assert node.publish_outcome(nowhere, outcome, FAILURE) == 1
    said = f"error: {nowhere}/{names.OUTCOME} can't be written\n"
    assert capsys.readouterr().err == said + text
    assert node.publish_outcome(nowhere, Outcome("finished"), None) == 74, "the others wait"
    assert capsys.readouterr().err == said


@pytest.mark.parametrize(
    "reason, by_file",
    [
        ("STOP file", True),
        ("enough of it", True),
        ("SIGTERM", False),
        (ELSEWHERE, False),
    ],
)
def test_a_stop_that_a_signal_asked_for_is_told_from_one_by_a_file(tmp_path, reason, by_file):
    """A node that shuts down sends SIGTERM to its launcher, and the job has to go on elsewhere."""
    write_status(tmp_path, "stopped", 5, reason)
    outcome = node.outcome_of(tmp_path, tmp_path / "77.0", None, has_own_words=False)
    assert outcome == Outcome("stopped", 0, stop_file=by_file)


def test_the_other_launchers_end_after_the_first(tmp_path, monkeypatch):
    """Slurm kills the step a minute after the first end of a launcher, and rank 0 may write the model for hours."""
    monkeypatch.setenv("SLURM_NODEID", "1")
    first = threading.Timer(1.5, node.leave, [tmp_path / names.OUTCOME, {"status": "finished"}])
    first.start()
    assert node.publish_outcome(tmp_path, Outcome("finished"), None) == 0
    assert (tmp_path / names.OUTCOME).exists()


def test_a_node_that_has_no_ranks_yet_is_named():
    """After the words `restarts   the ranks after the loss of`."""
    assert Failure.of_node("error: no more").summary() == f"{node_name()}: error: no more"


def test_an_agent_whose_first_node_has_gone_says_it_in_a_line(monkeypatch):
    def lose_store(*_):
        raise DistNetworkError("Failed to recv, got 0 bytes\nException raised from recvBytes")

    monkeypatch.setattr(agent, "elastic_launch", lambda *_: lose_store)
    monkeypatch.setattr(agent.logging, "disable", print)
    monkeypatch.setenv(agent.ALL_RANKS, "")  # it comes back
    options = agent.read_options(["--nnodes=2", "--rdzv-endpoint=a:1", "training.py"])
    failure = agent.run_ranks(options, watcher=None)
    assert "has lost the first" in failure.reason and "\n" not in failure.reason


def test_a_killed_rank_failed_first_and_then_the_earliest(tmp_path):
    later = replace(FAILURE, rank=4, time=3.0)
    killed = replace(FAILURE, rank=5, time=4.0, was_killed=True)
    misses_others = replace(FAILURE, rank=None, time=1.0)  # by a clock that is behind, say
    for failure in (later, FAILURE, misses_others):
        node.leave(tmp_path / f"{failure.rank}.json", asdict(failure))
    (tmp_path / "gone.json").symlink_to("nowhere")  # removed since it was listed
    (tmp_path / "other.json").write_text('{"of": "another version"}')
    assert first_failure(tmp_path) == FAILURE
    node.leave(tmp_path / "5.json", asdict(killed))
    assert first_failure(tmp_path) == killed


def test_the_users_own_environment_stays(monkeypatch, tmp_path):
    monkeypatch.setattr(os, "environ", {"GLOO_SOCKET_IFNAME": "mine", "PROCESSES_PER_NODE": "1"})
    set_environment(tmp_path / "runs/a", tmp_path, "localhost")
    found = os.environ
    assert found["GLOO_SOCKET_IFNAME"] == "mine" and "OMP_NUM_THREADS" not in found
    assert found["TRITON_CACHE_DIR"] == str(tmp_path / "runs/.cache/triton")
    assert found["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "runs/.cache/inductor")


def test_the_image_leaves_the_launchers_choices_to_it(monkeypatch, tmp_path, project):
    """What the image's ENV sets would count as the user's own: a cache in /tmp, for one, ends with the job."""
    monkeypatch.setattr(os, "environ", {})
    set_environment(tmp_path / "runs/a", tmp_path, "")
    (block,) = re.findall(r"^ENV ((?:.*\\\n)*.*)$", (project / "Dockerfile").read_text(), re.M)
    in_image = dict(re.findall(r"(\w+)=(\S+)", block))
    assert "LNAME" in in_image and "TORCHINDUCTOR_CACHE_DIR" in os.environ
    assert not in_image.keys() & (os.environ.keys() - {"TRITON_CACHE_MANAGER"})


@pytest.mark.parametrize("own", ["", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_memory_in_segments_that_grow(monkeypatch, tmp_path, own):
    """Unless the user has settings of the allocator, by either name."""
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    monkeypatch.setattr(os, "environ", {own: "mine"} if own else {})
    set_environment(tmp_path / "runs/a", tmp_path, "")
    found = {name: os.environ.get(name) for name in names}
    if own:
        assert found == dict.fromkeys(names) | {own: "mine"}
    else:
        assert found == dict.fromkeys(names, "expandable_segments:True")


@pytest.mark.parametrize(
    "given, expected",
    [
        ({}, "triton.runtime.rank0_cache:Rank0CacheManager"),
        ({"TRITON_CACHE_MANAGER": "my:Own"}, "my:Own"),
    ],
)
def test_the_rank0_cache_writer_is_used_where_the_environment_has_it(
    monkeypatch, tmp_path, project, given, expected
):
    """Triton 3.4 and newer have to be told, and in a .venv there is no image that does."""
    for name in ("triton/__init__.py", "triton/runtime/rank0_cache.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(__import__("sys").modules, "triton", raising=False)
    monkeypatch.setattr(os, "environ", {"PROCESSES_PER_NODE": "1", **given})
    set_environment(tmp_path / "runs/a", tmp_path, "")
    assert os.environ["TRITON_CACHE_MANAGER"] == expected
    if not given:
        assert f'"{expected}"' in (project / "patches/apply.py").read_text()
