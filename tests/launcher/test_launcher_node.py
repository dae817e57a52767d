"""mamba_fsdp.launch.node: how the ranks of a node end when the node is told to stop, and what they find around them."""

import inspect
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from datetime import timedelta
from types import SimpleNamespace

import pytest
from torch.distributed import TCPStore
from torch.distributed.elastic.agent.server import Worker
from torch.distributed.elastic.rendezvous import dynamic_rendezvous

from mamba_fsdp.errors import StorageError
from mamba_fsdp.launch import node
from tests.support.projects import FAKE_TRAINING, make_project, make_venv, starts

CLEAN = {
    name: value
    for name, value in os.environ.items()
    if not name.startswith(("SLURM", "TRITON_", "GLOO_")) and name != "CUDA_VISIBLE_DEVICES"
}
AMONG_NODES = [
    "--nnodes=1",
    "--rdzv-backend=c10d",
    "--rdzv-endpoint=localhost:0",
]  # as in Slurm, with one node
SIGTERM_COMES, IMPORTS_TORCH = (
    "os.kill(os.getpid(), signal.SIGTERM)",
    "from torch.distributed import run as torchrun\n",
)
STARTS_FOR_EVER = "import os, time\nopen(f'started-{os.environ[\"RANK\"]}', 'w')\ntime.sleep(600)\n"  # no handler yet

pytestmark = pytest.mark.torch22


@pytest.fixture
def start_node(tmp_path):
    """start_node(*words, training=FAKE_TRAINING, steps=500, packages=(), insert=None, **environment) ->
    (process, project folder).

    packages: names of empty files to put into the .venv; insert: (a file of the project, a line, what follows)."""
    started = []

    def start(*words, training=FAKE_TRAINING, steps=500, packages=(), insert=None, **environment):
        project = make_project(tmp_path / "project", training=training)
        if insert:
            file, line, text = project / insert[0], *insert[1:]
            assert file.read_text().count(line) == 1
            file.write_text(file.read_text().replace(line, line + text))
        (packages_folder,) = make_venv(project).glob("lib/*/site-packages")
        for file in (packages_folder / name for name in packages):
            file.parent.mkdir(parents=True, exist_ok=True)
            file.touch()
        command = [
            project / ".venv/bin/python",
            "-m",
            "mamba_fsdp.launch.node",
            "failures",
            *words,
            "training.py",
            "--save_ckpt_path=run",
            f"--num_steps={steps}",
        ]
        started.append(
            subprocess.Popen(
                command,
                env={**CLEAN, **environment},
                cwd=project,
                text=True,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                preexec_fn=few_files,
            )
        )
        return started[-1], project

    yield start
    for process in started:
        if process.poll() is None:
            process.kill()


@pytest.fixture
def agent(tmp_path, monkeypatch):
    """One whose rank is no process: `code` is what it ended with, `told` the signals that it was sent."""
    monkeypatch.setenv("PROCESSES_PER_NODE", "2")
    monkeypatch.setattr(node.signal, "signal", lambda *_: None)
    monkeypatch.setattr(node, "where_ranks_meet", lambda group: ("localhost", "1"))
    monkeypatch.setattr(node, "meet_fast", lambda nodes: None)
    agent, told = (
        node.Agent(tmp_path / "run/failures/1", ["--standalone", "training.py"], tmp_path),
        [],
    )
    monkeypatch.setattr(
        node,
        "Rank",
        lambda words, environment: SimpleNamespace(
            pid=1, poll=lambda: agent.code, send_signal=told.append, wait=lambda seconds: None
        ),
    )
    agent.code, agent.told, agent.group = None, told, agent.get_worker_group()
    agent.group.workers, agent.group.group_rank = [Worker(0, global_rank=0, world_size=1)], 0
    yield agent
    agent.nodes.shutdown()


def test_storage_that_fails_when_a_rank_has_failed_is_a_line(agent, tmp_path, monkeypatch, capsys):
    """The failure is on record, with its exit code; nothing starts in place."""

    def fails(_):
        raise StorageError("checkpoints: Input/output error")

    monkeypatch.setattr(node, "committed", fails)
    agent.alone = False
    agent._start_workers(agent.group)
    assert not agent._monitor_workers(agent.group).is_failed()
    agent.code = 74
    assert agent._monitor_workers(agent.group).is_failed()
    assert agent.noted == [1] and agent._remaining_restarts == 0
    assert capsys.readouterr().err == "error: checkpoints: Input/output error\n"
    assert next((tmp_path / "run/failures/1").iterdir()).name.endswith("exit74.txt")


def few_files():
    """As a login shell has it."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))


def wait_until(happened):
    end = time.monotonic() + 400
    while not happened():
        assert time.monotonic() < end, "it never came"
        time.sleep(0.05)


def finish(process):
    output, _ = process.communicate(timeout=400)
    return process.returncode, output


@pytest.mark.slow
@pytest.mark.parametrize(
    "number, seconds",
    [pytest.param(signal.SIGTERM, 35, marks=pytest.mark.slow), (signal.SIGUSR1, 1)],
)
def test_ranks_that_are_asked_to_stop_have_the_time_they_need(start_node, number, seconds):
    """By itself torchrun kills them after 30 s, and SIGUSR1 ends it without a word to them."""
    process, project = start_node(
        "--standalone", PROCESSES_PER_NODE="2", FAKE_COMMIT_SECONDS=str(seconds)
    )
    wait_until(lambda: len(starts(project / "run")) == 2)
    process.send_signal(number)
    code, output = finish(process)
    assert code == 128 + number and "Traceback" not in output
    assert '"stopped"' in (project / "run/status.json").read_text()
    assert list(project.glob("run/checkpoints/step_*/COMMIT"))
    assert not (project / "failures").exists()


@pytest.mark.slow
def test_ranks_that_only_start_end_at_once_and_count_as_stopped(start_node):
    process, project = start_node("--standalone", training=STARTS_FOR_EVER, PROCESSES_PER_NODE="2")
    wait_until(lambda: len(list(project.glob("started-*"))) == 2)
    process.send_signal(signal.SIGTERM)
    assert finish(process) == (143, "")
    assert not (project / "failures").exists(), "they were ended, they have not failed"


SAVES_AND_DIES = """
import os, pathlib, sys
begun = pathlib.Path("begun")
begun.write_text(begun.read_text() + "!" if begun.exists() else "!")
if len(begun.read_text()) < 4:
    step = pathlib.Path(f"checkpoints/step_{len(begun.read_text()):08}")
    step.mkdir(parents=True)
    (step / "COMMIT").touch()
sys.exit(len(begun.read_text()) != int(os.environ["GOOD_START"]))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "where, good, code", [(AMONG_NODES, 5, 1), (["--standalone"], 5, 1), (["--standalone"], 4, 0)]
)
def test_ranks_start_again_in_place_as_long_as_there_are_new_checkpoints(
    start_node, where, good, code
):
    process, project = start_node(*where, training=SAVES_AND_DIES, GOOD_START=str(good))
    assert finish(process)[0] == code and (project / "begun").read_text() == "!!!!"


STOPPED_IN_BETWEEN = """
import os, pathlib, signal
from mamba_fsdp.launch import forks, node
def start(rank, *given, start=forks.Rank.__init__):
    start(rank, *given)
    os.kill(os.getpid(), signal.SIGTERM)
forks.Rank.__init__ = start
raise SystemExit(node.main(pathlib.Path("failures"), ["--standalone", "training.py"], "."))
"""


@pytest.mark.slow
def test_sigterm_while_it_starts_the_ranks_ends_those_that_it_has_started(project, tmp_path):
    (tmp_path / "training.py").write_text(STARTS_FOR_EVER)
    done = subprocess.run(
        [sys.executable, "-c", STOPPED_IN_BETWEEN],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env={**CLEAN, "PYTHONPATH": str(project), "PROCESSES_PER_NODE": "2"},
        timeout=400,
    )
    assert (done.returncode, done.stdout + done.stderr) == (143, "")


ASKED_AT_ONCE = """
import os, signal
from mamba_fsdp.launch import forks
class Late(dict):  # the rank takes a second to read it, before anything of ours runs there
    def __reduce__(self):
        return eval, (f"__import__('time').sleep(1) or {dict(self)}",)
forks.IMPORTS.clear()
forks.prepare()
rank = forks.Rank(("python", "-u", "training.py"), Late(os.environ, WORLD_SIZE="1", RANK="0"))
rank.send_signal(signal.SIGTERM)
rank.wait(100)
print(rank.poll())
"""


def test_a_request_that_comes_while_a_rank_is_forked_waits_for_it(project, tmp_path):
    (tmp_path / "training.py").write_text("")
    done = subprocess.run(
        [sys.executable, "-c", ASKED_AT_ONCE],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env={**CLEAN, "PYTHONPATH": str(project)},
        timeout=400,
    )
    assert (done.stdout, done.stderr) == (f"{-signal.SIGTERM}\n", "")


@pytest.mark.slow
def test_sigterm_while_it_waits_for_the_errors_of_other_nodes_is_quiet(start_node):
    waits = "        time.sleep(SECONDS_FOR_OTHERS)\n"
    process, _ = start_node(
        *AMONG_NODES,
        FAKE="mistake",
        insert=("mamba_fsdp/launch/node.py", waits, f"        {SIGTERM_COMES}\n"),
    )
    code, output = finish(process)
    assert code == 1 and "Traceback" not in output


@pytest.mark.slow
@pytest.mark.parametrize(
    "file, line, moment",
    [
        ("forks", "    forkserver.ensure_running()\n", f"    {SIGTERM_COMES}\n"),
        ("node", IMPORTS_TORCH, f"{SIGTERM_COMES}\n"),
        ("node", IMPORTS_TORCH, f"try:\n    {SIGTERM_COMES}\nexcept:\n    pass\n"),
    ],
    ids=["the server of forks starts", "torch is imported", "an import forgives"],
)
def test_sigterm_while_it_starts_is_quiet_and_leaves_nothing(
    start_node, tmp_path, file, line, moment
):
    """Also what torch makes as it is imported, beside the launcher."""
    (tmp_path / "tmp").mkdir()
    process, _ = start_node(
        "--standalone",
        insert=(f"mamba_fsdp/launch/{file}.py", line, moment),
        TMPDIR=str(tmp_path / "tmp"),
    )
    assert finish(process) == (143, "")
    assert not list((tmp_path / "tmp").iterdir())


@pytest.mark.slow
def test_sigterm_while_it_looks_for_other_nodes_is_quiet(start_node):
    process, project = start_node(
        *AMONG_NODES[:2], "--rdzv-endpoint=192.0.2.1:29400"
    )  # nobody there: it keeps trying
    time.sleep(2)
    process.send_signal(signal.SIGTERM)
    assert finish(process) in [(-signal.SIGTERM, ""), (143, "")]


def test_ranks_that_start_again_learn_of_a_request_that_came_before_them(agent):
    agent._start_workers(agent.group)
    assert agent.told == []
    agent._pass_on(signal.SIGUSR1, None)
    assert agent.told == [signal.SIGTERM]
    agent._start_workers(agent.group)
    assert (agent.told, agent.asked) == ([signal.SIGTERM] * 2, [signal.SIGUSR1])


def test_nobody_takes_the_port_on_which_the_first_rank_is_going_to_listen(agent, monkeypatch):
    with socket.socket() as free:
        free.bind(("", 0))
        port = free.getsockname()[1]
    monkeypatch.setattr(node, "where_ranks_meet", lambda group: ("localhost", str(port)))
    agent._start_workers(agent.group)
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(("", port))
    store = TCPStore("localhost", port, 1, is_master=True)
    assert store.port == port


@pytest.mark.parametrize("nodes, pause", [(1, 0.1), (50, 0.5), (1000, 1.0)])
def test_nodes_look_for_each_other_often_but_all_together_not_too_often(monkeypatch, nodes, pause):
    """It sets what torch keeps to itself: each name must be there."""
    slept, holder = [], dynamic_rendezvous._BackendRendezvousStateHolder
    monkeypatch.setattr(node.time, "sleep", slept.append)
    for name in ("_delay", "get_method_name"):
        monkeypatch.setattr(dynamic_rendezvous, name, getattr(dynamic_rendezvous, name))
    monkeypatch.setattr(holder.__init__, "__defaults__", holder.__init__.__defaults__)
    settings = dynamic_rendezvous.RendezvousSettings(
        "run", 1, 1, dynamic_rendezvous.RendezvousTimeout(), timedelta(seconds=5), 3
    )
    assert holder(None, settings)._cache_duration == 1
    node.meet_fast(nodes)
    dynamic_rendezvous._delay(seconds=1)
    assert slept == [pause] and holder(None, settings)._cache_duration == pause
    assert "get_method_name()" in inspect.getsource(dynamic_rendezvous)


def test_a_torch_that_keeps_other_things_to_itself_stays_as_it_is(monkeypatch, capfd):
    class Holder:
        def __init__(self, store, cache=1, others=2):
            self.cache = cache, others

    monkeypatch.setattr(
        node, "dynamic_rendezvous", SimpleNamespace(_BackendRendezvousStateHolder=Holder)
    )
    node.meet_fast(1)
    assert vars(node.dynamic_rendezvous) == {"_BackendRendezvousStateHolder": Holder} and Holder(
        0
    ).cache == (1, 2)
    monkeypatch.setattr(node, "dynamic_rendezvous", SimpleNamespace())
    node.meet_fast(1)
    assert capfd.readouterr() == ("", "")


IMPORT_WITHOUT_CUDA = """
import os, torch
def ask(*_):
    raise SystemExit("CUDA was asked")
for name in ("is_available", "device_count", "current_device", "_lazy_init", "init"):
    setattr(torch.cuda, name, ask)
if torch.version.cuda:
    torch._C._cuda_getDeviceCount = ask
from mamba_fsdp.launch import forks
for name in forks.IMPORTS:
    try:
        __import__(name)
    except ImportError:
        assert name == "mamba_fsdp.parallel.fsdp2" and torch.__version__ < "2.6"
print(len(os.listdir("/proc/self/task")), "thread")
"""


@pytest.mark.slow
def test_what_ranks_are_forked_from_has_asked_cuda_nothing_and_has_one_thread(project):
    """Else no fork of it could use a GPU, and locks of other threads would stay locked."""
    done = subprocess.run(
        [sys.executable, "-c", IMPORT_WITHOUT_CUDA],
        cwd=project,
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.stdout == "1 thread\n", done.stdout + done.stderr


START_A_RANK = """
import os
from mamba_fsdp.launch import forks
forks.IMPORTS = ["asks_cuda"]
os.environ["GONE"] = "by then"
forks.prepare()
del os.environ["GONE"]
rank = forks.Rank(("python", "-u", "rank.py", "word"), {**os.environ, "WORLD_SIZE": "1"})
rank.wait()
print(rank.poll())
"""


@pytest.mark.parametrize("bad", [True, False])
def test_a_rank_whose_parent_has_asked_cuda_something_is_no_fork(project, tmp_path, bad):
    (tmp_path / "asks_cuda.py").write_text(
        f"import sys, types\nsys.modules['torch.cuda'] = types.SimpleNamespace(_is_in_bad_fork=lambda: {bad})\n"
    )
    (tmp_path / "rank.py").write_text(
        "import os, sys\nprint(*sys.argv, 'torch.cuda' in sys.modules, 'GONE' in os.environ)\nsys.exit(3)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", START_A_RANK],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env={**CLEAN, "PYTHONPATH": f"{project}:{tmp_path}"},
    )
    assert done.stdout == f"rank.py word {not bad} False\n3\n", done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    "where, given, expected",
    [
        (AMONG_NODES, {"GLOO_SOCKET_IFNAME": "mine"}, "mine"),
        (AMONG_NODES, {"LAST_NODE": "localhost"}, None),
        (["--standalone"], {}, None),
    ],
)
def test_gloo_keeps_the_users_interface_and_its_own_choice_on_a_node_alone(
    start_node, where, given, expected
):
    """Towards another node it is set: test_launcher_interface.py."""
    process, project = start_node(*where, steps=1, **given)
    code, output = finish(process)
    assert code == 0, output
    (start,) = starts(project / "run")
    assert start["environment"].get("GLOO_SOCKET_IFNAME") == expected
    assert (
        start["open_files"] == [resource.getrlimit(resource.RLIMIT_NOFILE)[1]] * 2
    )  # as torchrun of many nodes needs


@pytest.mark.slow
@pytest.mark.parametrize(
    "packages, given, expected",
    [
        (
            ["triton/__init__.py", "triton/runtime/rank0_cache.py"],
            {},
            "triton.runtime.rank0_cache:Rank0CacheManager",
        ),
        (
            ["triton/__init__.py", "triton/runtime/rank0_cache.py"],
            {"TRITON_CACHE_MANAGER": "my:Own"},
            "my:Own",
        ),
        (["triton/__init__.py"], {}, None),
    ],
)
def test_the_rank0_cache_writer_is_used_where_the_environment_has_it(
    start_node, project, packages, given, expected
):
    """Triton 3.4 and newer have to be told, and in a .venv there is no image that does."""
    process, folder = start_node("--standalone", steps=1, packages=packages, **given)
    code, output = finish(process)
    assert code == 0, output
    (start,) = starts(folder / "run")
    assert start["environment"].get("TRITON_CACHE_MANAGER") == expected
    assert (
        expected in (None, "my:Own")
        or f'"{expected}"' in (project / "patches/apply.py").read_text()
    )
