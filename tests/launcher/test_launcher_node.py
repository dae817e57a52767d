"""mamba_fsdp.launch.node: how the ranks of a node end and start again, and what they find around them."""

import os
import resource
import signal
import subprocess

import pytest

from mamba_fsdp.launch.machine import set_environment
from tests.support.processes import finish, wait_until
from tests.support.projects import FAKE_TRAINING, FOR_EVER, make_project, make_venv, starts

ALONE = ["--standalone"]
AMONG_NODES = ["--nnodes=1", "--rdzv-endpoint=localhost:0", "--rdzv-id=7.0"]  # as in Slurm
STARTS_FOR_EVER = "import os, time\nopen(f'started-{os.environ[\"RANK\"]}', 'w')\ntime.sleep(600)\n"
COMMITS_AND_DIES = """
import os, pathlib, sys
begun = pathlib.Path("begun")
begun.write_text(begun.read_text() + "!" if begun.exists() else "!")
count = len(begun.read_text())
if count < 4:
    pathlib.Path(f"run/checkpoints/step_{count:08d}").mkdir(parents=True)
    pathlib.Path(f"run/checkpoints/step_{count:08d}/COMMIT").touch()
sys.exit(count != int(os.environ["GOOD_START"]))
"""
DIES_WHEN_ASKED_TO_STOP = """
import os, signal, time
os.makedirs("run/checkpoints/step_00000001", exist_ok=True)
open("run/checkpoints/step_00000001/COMMIT", "w").close()
open("begun", "a").write("!")
while not os.path.exists("run/STOP") or os.stat("run/STOP").st_size == 0:
    time.sleep(0.05)
os.kill(os.getpid(), signal.SIGKILL)
"""
LEAVES_A_FAILURE = """
import json
from pathlib import Path
left = {"node": "a", "rank": 0, "exit_code": 1, "killed": False, "time": 1.0, "said": "Error: no more\\nthan this"}
Path("run/failures/7.0").mkdir(parents=True)
Path("run/failures/7.0/a.json").write_text(json.dumps(left))
"""
HAS_NO_PLACE_FOR_FAILURES = """
from pathlib import Path
Path("run").mkdir()
Path("run/failures").touch()
"""
SAYS_WHEN_IT_LOOKS = """
from torch.distributed.elastic.rendezvous import c10d_rendezvous_backend
connect = c10d_rendezvous_backend.TCPStore
def say_and_connect(*given, **named):
    open("looks", "w").close()
    return connect(*given, **named)
c10d_rendezvous_backend.TCPStore = say_and_connect
"""
IMPATIENT_TORCH = """
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import api
for method in (LocalElasticAgent._shutdown, api.PContext.close):
    method.__defaults__ = tuple(1 if value == 30 else value for value in method.__defaults__)
"""

pytestmark = [pytest.mark.torch22, pytest.mark.slow]


@pytest.fixture
def start_node(tmp_path, monkeypatch):
    """start_node(*words, training=FAKE_TRAINING, before="", **environment) -> (process, project folder). before: what
    the launcher runs first."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    started = []

    def start(*words, training=FAKE_TRAINING, before="", **environment):
        project = make_project(tmp_path / "project", training=training)
        node = project / "mamba_fsdp/launch/node.py"
        node.write_text(before + node.read_text())
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


def test_ranks_that_are_asked_to_stop_have_the_time_they_need(start_node):
    """By itself torchrun kills them after 30 s, here after one, and SIGUSR1 ends it without a word to them."""
    environment = {"PROCESSES_PER_NODE": "2", "FAKE_COMMIT_SECONDS": "4"}
    process, project = start_node(*ALONE, before=IMPATIENT_TORCH, **environment)
    wait_until(lambda: len(starts(project / "run")) == 2)
    process.send_signal(signal.SIGUSR1)
    wait_until(lambda: '"stopped"' in (project / "run/status.json").read_text())
    process.send_signal(signal.SIGTERM)  # more of them change nothing
    code, output = finish(process)
    assert code == 128 + signal.SIGUSR1 and "Traceback" not in output
    assert list(project.glob("run/checkpoints/step_*/COMMIT"))


def test_ranks_that_only_start_end_at_once_and_count_as_stopped(start_node):
    process, project = start_node(*ALONE, training=STARTS_FOR_EVER, PROCESSES_PER_NODE="2")
    wait_until(lambda: len(list(project.glob("started-*"))) == 2)
    process.send_signal(signal.SIGTERM)
    assert finish(process) == (143, "")


@pytest.mark.parametrize("where, good, code", [(AMONG_NODES, 5, 1), (ALONE, 4, 0)])
def test_ranks_start_again_in_place_as_long_as_there_are_new_checkpoints(
    start_node, where, good, code
):
    """Where Slurm starts the step of a node that went again, what is on record is a failure for its sake."""
    process, project = start_node(
        *where, training=COMMITS_AND_DIES, before=LEAVES_A_FAILURE, GOOD_START=str(good)
    )
    returned, output = finish(process)
    assert returned == code and (project / "begun").read_text() == "!!!!"
    told = [line for line in output.splitlines() if line.startswith("restarts   the ranks after")]
    assert told[-1].startswith("restarts   the ranks after the loss of rank 0 on ")
    assert told[-1].endswith("It ended with exit code 1; its output is above.")
    assert (where == AMONG_NODES) == told[0].endswith("the loss of a node")
    if where == AMONG_NODES:
        status_and_code, first, _ = (
            (project / "run/failures/7.0/outcome").read_text().split("\n", 2)
        )
        assert status_and_code == "unknown 1" and first.endswith("failed first.")


def test_ranks_that_die_when_they_are_asked_to_stop_do_not_start_again(start_node):
    """Though there is a new checkpoint."""
    process, project = start_node(*AMONG_NODES, training=DIES_WHEN_ASKED_TO_STOP)
    wait_until((project / "begun").exists)
    (project / "run/STOP").write_text("enough")
    code, _ = finish(process)
    assert code == 128 + signal.SIGKILL and (project / "begun").read_text() == "!"
    assert (project / "run/failures/7.0/outcome").read_text().startswith("stopped 137\n")


def test_sigterm_while_it_looks_for_other_nodes_is_quiet(start_node):
    """Nobody is there: it keeps trying."""
    words = ["--nnodes=1", "--rdzv-endpoint=192.0.2.1:29400", "--rdzv-id=1"]
    process, project = start_node(*words, before=SAYS_WHEN_IT_LOOKS)
    wait_until((project / "looks").exists)
    process.send_signal(signal.SIGTERM)
    assert finish(process) in [(-signal.SIGTERM, ""), (143, "")]


def test_a_failure_that_can_not_be_put_on_record_is_told_all_the_same(start_node):
    process, project = start_node(*AMONG_NODES, before=HAS_NO_PLACE_FOR_FAILURES, FAKE="mistake")
    code, output = finish(process)
    assert code in (1, 2) and "failed first.\nerror: the cause on rank 0\n" in output
    (start,) = starts(project / "run")
    many = [resource.getrlimit(resource.RLIMIT_NOFILE)[1]] * 2
    assert start["open_files"] == many, "many nodes need them"


def test_the_users_own_environment_stays(monkeypatch, tmp_path):
    monkeypatch.setattr(os, "environ", {"GLOO_SOCKET_IFNAME": "mine", "PROCESSES_PER_NODE": "1"})
    set_environment(tmp_path / "runs/a", tmp_path, "localhost")
    found = os.environ
    assert found["GLOO_SOCKET_IFNAME"] == "mine" and "OMP_NUM_THREADS" not in found
    assert found["TRITON_CACHE_DIR"] == str(tmp_path / "runs/.cache/triton")
    assert found["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "runs/.cache/inductor")


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
