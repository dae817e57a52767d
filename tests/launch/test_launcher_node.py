"""Tests mamba_fsdp.launch.node: how the ranks of a node end and restart, and the environment that they get."""

import json
import os
import re
import signal
import sys
from dataclasses import asdict, replace

import pytest
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from mamba_fsdp.errors import UserError
from mamba_fsdp.launch import node
from mamba_fsdp.launch.decision import EXIT_NODE_FAULT, TrainingOutcome
from mamba_fsdp.launch.failures import Failure, first_failure
from mamba_fsdp.launch.machine import (
    LOOPBACK,
    find_interface_to,
    node_name,
    processes_per_node,
    set_environment,
)
from mamba_fsdp.run import names
from mamba_fsdp.run.records import OTHER_RANK_REASON, write_status
from mamba_fsdp.this_process import write_torchrun_error
from tests.support.processes import run_program


@pytest.mark.slow
@pytest.mark.torch22
def test_a_node_that_can_not_reach_the_first_one_reports_it(project, tmp_path):
    """A node that can't reach the first node exits with a message instead of a traceback. The rendezvous is static, as
    in Kubernetes, where the first node has a fixed rank."""
    words = ["--nnodes=2", "--node-rank=1", "--rdzv-backend=static", "--rdzv-conf=timeout=1"]
    words += ["--master-addr=127.0.0.1", "--master-port=1", "training.py"]
    launcher = [sys.executable, "-m", "mamba_fsdp.launch.node", tmp_path / "run"]
    done = run_program(*launcher, *words, cwd=project)
    last = done.stderr.splitlines()[-1]
    assert done.returncode == 1, done
    assert "could not join the rendezvous, or lost the connection to the first node." in last
    assert "Traceback" not in done.stderr, "torch prints lines of its own"


FAILURE = Failure("a", rank=3, exit_code=74, was_killed=False, time=2.0, reason="Error: no more")


@pytest.mark.parametrize(
    "name, kept_files, output",
    [
        ("77.0", [names.RESOLVED], "restarts   the ranks after the loss of a node\n"),
        (node.DEFAULT_RUN_ID, [], ""),
    ],
)
def test_files_of_an_earlier_start_are_removed(
    tmp_path, capsys, monkeypatch, name, kept_files, output
):
    """The first node removes the failures and the outcome of an earlier start from the folder of the start.

    If the folder is named after a job of Slurm, Slurm has started the step again to replace a node that failed, and the
    file with the resolved settings is kept. Otherwise the files can come from any start, including one of another
    version, and all are removed.
    """
    folder = tmp_path / name
    folder.mkdir()
    for file in ("a.json", names.OUTCOME, names.RESOLVED):
        (folder / file).write_text('{"of": "another version"}')
    monkeypatch.setenv("SLURM_NODEID", "1")
    node.remove_earlier_outcome(folder)
    assert len(list(folder.iterdir())) == 3
    monkeypatch.setenv("SLURM_NODEID", "0")
    node.remove_earlier_outcome(folder)
    assert capsys.readouterr().out == output
    assert [path.name for path in folder.glob("*")] == kept_files


FIRST = "rank 3 on a failed first.\nError: no more\n"
MEANWHILE = "error: not restarted: the file STOP requested the end of the run, but a rank failed before it had stopped\n"
SUMMARY = "rank 3 on a: Error: no more"
# {(status, reason, whether a rank failed, whether the file STOP exists): (outcome, exit code outside Slurm)}
OUTCOMES = {
    ("finished", "", False, False): (TrainingOutcome("finished"), 0),
    ("stopped", "STOP file", False, True): (TrainingOutcome("stopped", stop_file=True), 0),
    ("stopped", "enough of it", False, False): (TrainingOutcome("stopped", stop_file=True), 0),
    ("stopped", "SIGTERM", False, False): (TrainingOutcome("stopped"), 143),
    ("stopped", OTHER_RANK_REASON, False, False): (TrainingOutcome("stopped"), 143),
    ("running", "", True, False): (TrainingOutcome("failed", 74, SUMMARY, False, FIRST, "a"), 74),
    ("running", "", True, True): (TrainingOutcome("stopped", 74, SUMMARY, True, FIRST, "a"), 2),
}


@pytest.mark.parametrize("found", OUTCOMES)
def test_how_the_training_ended(tmp_path, capsys, found):
    """The outcome follows from status.json, the first failure and the file STOP, and determines the exit code outside
    Slurm.

    A node that shuts down sends SIGTERM to its launcher, and the job has to continue elsewhere. After a restart, a file
    STOP must still be effective.
    """
    status, reason, has_failed, is_asked = found
    outcome, code = OUTCOMES[found]
    write_status(tmp_path, status, 3, reason)
    if is_asked:
        (tmp_path / names.STOP).touch()
    failure = FAILURE if has_failed else None
    built = node.build_outcome(tmp_path, tmp_path / "starts/77.0", failure, error_is_printed=False)
    assert built == outcome
    assert node.print_outcome(outcome) == code
    assert capsys.readouterr().err == outcome.error + (MEANWHILE if code == 2 else "")


@pytest.mark.parametrize("is_of_this_start", [True, False])
def test_a_run_that_is_finished_stays_so_if_a_rank_fails_while_it_exits(tmp_path, is_of_this_start):
    """The status `finished` of this start counts even if a rank fails while it exits. The status of an earlier start
    does not count."""
    folder = tmp_path / "starts/77.0"
    folder.mkdir(parents=True)
    settings = folder / names.RESOLVED
    settings.touch()
    write_status(tmp_path, "finished", 3)
    os.utime(settings, (0, 0) if is_of_this_start else None)
    outcome = node.build_outcome(tmp_path, folder, FAILURE, error_is_printed=False)
    assert (outcome.status, outcome.code) == ("finished", 0 if is_of_this_start else 74)


def test_an_error_that_a_rank_printed_is_not_repeated_and_a_start_can_have_its_own_stop_file(
    tmp_path,
):
    folder = tmp_path / "77.0"
    folder.mkdir()
    (folder / names.STOP).touch()
    outcome = node.build_outcome(tmp_path, folder, FAILURE, error_is_printed=True)
    assert (outcome.status, outcome.stop_file, outcome.error) == ("stopped", False, "")
    killed = replace(FAILURE, was_killed=True)
    assert node.build_outcome(tmp_path, folder, killed, error_is_printed=True).error == FIRST


def test_an_outcome_that_can_not_be_written_is_printed(tmp_path, capsys):
    outcome = TrainingOutcome("failed", 74, error=FIRST)
    assert node.publish_outcome(tmp_path, outcome, FAILURE) == 74
    assert TrainingOutcome(**json.loads((tmp_path / names.OUTCOME).read_text())) == outcome
    nowhere = tmp_path / names.OUTCOME / "is a file"
    assert node.publish_outcome(nowhere, outcome, FAILURE) == 74
    message, _, rest = capsys.readouterr().err.partition("\n")
    assert message.startswith(f"error: can't write {nowhere}/{names.OUTCOME}: ")
    assert "Not a directory" in message and "check the space and the permissions" in message
    assert rest == "The training failed with:\n" + FIRST
    assert node.publish_outcome(nowhere, TrainingOutcome("finished"), None) == 74, "the others wait"


@pytest.mark.parametrize(
    "given, ranks",
    [("3", 3), ("auto", 1), ("", 1)],
)
def test_ranks_of_a_node(monkeypatch, given, ranks):
    """PROCESSES_PER_NODE overrides a TrainJob's numProcPerNode, which is `auto` on a node with GPUs."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("PET_NPROC_PER_NODE", given)
    assert processes_per_node() == ranks
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    monkeypatch.setenv("PROCESSES_PER_NODE", "2")
    assert processes_per_node() == 2


def test_the_network_interface_is_the_one_to_the_first_reachable_host():
    assert find_interface_to(["no.such.host.invalid", LOOPBACK]) == "lo"
    assert find_interface_to(["127.0.0.2"]) == ""


# {exit code: exit code with RESTART_EXIT_CODE=129}
CODES = {0: 0, 1: 129, 2: 2, 74: 129, 137: 137, 143: 143}


@pytest.mark.parametrize("code", CODES)
def test_exit_codes_for_which_pytorchjob_restarts(monkeypatch, code):
    """RESTART_EXIT_CODE replaces smaller exit codes of failures of the launcher and the storage, but not of user
    errors."""
    monkeypatch.setattr(node, "main", lambda *_: code)
    assert node.start(["run"]) == code
    monkeypatch.setenv("RESTART_EXIT_CODE", "129")
    assert node.start(["run"]) == CODES[code]


def test_an_internal_error_of_the_launcher_keeps_its_traceback(monkeypatch, capsys):
    monkeypatch.setattr(node, "main", lambda *_: 1 / 0)
    assert node.start(["run"]) == 1
    first, *_, last = capsys.readouterr().err.splitlines()
    assert first.startswith("Traceback ") and last.startswith(
        "error: internal error of the launcher"
    )
    assert last.endswith(
        ": ZeroDivisionError: division by zero; please report it with the lines above"
    )
    monkeypatch.setenv("RESTART_EXIT_CODE", "256")
    assert node.start(["run"]) == 2
    assert capsys.readouterr().err.endswith("_CODE=256: expected an integer from 1 to 255\n")


def test_a_killed_rank_failed_first_and_then_the_earliest(tmp_path):
    later = replace(FAILURE, rank=4, time=3.0)
    killed = replace(FAILURE, rank=5, time=4.0, was_killed=True)
    # This failure has an earlier time than its cause, because the clock of its node is behind.
    misses_others = replace(FAILURE, rank=None, time=1.0)
    for failure in (later, FAILURE, misses_others):
        node.write_shared_json(tmp_path / f"{failure.rank}.json", asdict(failure))
    # Reading a broken link fails like reading a file that was removed after it was listed.
    (tmp_path / "gone.json").symlink_to("nowhere")
    (tmp_path / "other.json").write_text('{"of": "another version"}')
    assert first_failure(tmp_path) == FAILURE
    node.write_shared_json(tmp_path / "5.json", asdict(killed))
    assert first_failure(tmp_path) == killed
    # A faulty node is the cause of the failures of other ranks, even if its own failure is later.
    sick = replace(FAILURE, rank=6, time=5.0, exit_code=EXIT_NODE_FAULT)
    node.write_shared_json(tmp_path / "6.json", asdict(sick))
    assert first_failure(tmp_path) == sick


def test_a_rank_that_is_killed_after_its_error_has_failed_by_itself(tmp_path, monkeypatch):
    """A rank that has reported a user error and is then killed counts as failed with that error, because a user error
    must not count as a crash. The launcher kills such a rank if another rank fails at the same moment."""
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error"))
    write_torchrun_error(UserError("a mistake"))
    killed = ProcessFailure(0, 1, -signal.SIGKILL, str(tmp_path / "error"))
    failure = Failure.from_rank(3, killed)
    assert (failure.exit_code, failure.was_killed) == (2, False)
    assert failure.reason == "error: a mistake"


def test_a_traceback_is_summarised_by_its_exception(tmp_path, monkeypatch):
    """The summary of a failure contains only the exception of its traceback. nodes.jsonl contains this summary as the
    reason why the node is sick."""
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error"))
    try:
        raise RuntimeError("CUDA error: uncorrectable ECC error encountered\nCompile with ...")
    except RuntimeError as error:
        write_torchrun_error(error)
    failure = Failure.from_rank(3, ProcessFailure(0, 1, 1, str(tmp_path / "error")))
    expected = (
        "It exited with code 1: RuntimeError: CUDA error: uncorrectable ECC error encountered"
    )
    assert failure.summary() == f"rank 3 on {node_name()}: {expected}"
    assert "Traceback" in failure.text()


ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


@pytest.fixture
def environment(monkeypatch, tmp_path):
    """Returns a function environment(**given). The function returns the environment that a launcher makes for its ranks
    if its own environment is `given`."""

    def of(**given):
        monkeypatch.setattr(os, "environ", given)
        set_environment(tmp_path / "runs/a", tmp_path, "localhost")
        return os.environ

    return of


def test_caches_outlive_the_job_and_variables_of_the_user_are_kept(environment, tmp_path):
    found = environment(GLOO_SOCKET_IFNAME="mine", PROCESSES_PER_NODE="1")
    assert found["GLOO_SOCKET_IFNAME"] == "mine" and "OMP_NUM_THREADS" not in found
    assert found["TRITON_CACHE_DIR"] == str(tmp_path / "runs/.cache/triton")
    assert found["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "runs/.cache/inductor")
    assert found["TMPDIR"] == str(tmp_path) and found["LAUNCHER_PID"] == str(os.getpid())
    many = environment(PROCESSES_PER_NODE="2")
    threads = len(os.sched_getaffinity(0)) // 2
    assert many["OMP_NUM_THREADS"] == str(max(1, threads))


def test_the_image_does_not_set_variables_of_the_launcher(environment, project):
    """The ENV of the image does not set variables of the launcher, for example a cache in /tmp, because the launcher
    does not override variables."""
    found = environment()
    (block,) = re.findall(r"^ENV ((?:.*\\\n)*.*)$", (project / "Dockerfile").read_text(), re.M)
    in_image = dict(re.findall(r"(\w+)=(\S+)", block))
    assert "LNAME" in in_image
    assert not in_image.keys() & (found.keys() - {"TRITON_CACHE_MANAGER"})


@pytest.mark.parametrize("own", ALLOCATOR)
def test_the_allocator_has_expandable_segments(environment, own):
    """The launcher makes torch's allocator use expandable segments, unless the user has configured the allocator with
    either variable."""
    assert {environment()[name] for name in ALLOCATOR} == {"expandable_segments:True"}
    found = environment(**{own: "mine"})
    assert [found[name] for name in ALLOCATOR if name in found] == ["mine"]


def test_the_rank0_cache_writer_is_used_if_it_is_installed(
    environment, monkeypatch, tmp_path, project
):
    """The launcher sets TRITON_CACHE_MANAGER to the Rank0CacheManager if it is installed, and keeps a value of the
    user. Triton 3.4 and newer need this variable, and without an image, nothing else sets it."""
    for name in ("triton/__init__.py", "triton/runtime/rank0_cache.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "triton", raising=False)
    ours = environment()["TRITON_CACHE_MANAGER"]
    assert f'"{ours}"' in (project / "patches/apply.py").read_text()
    assert environment(TRITON_CACHE_MANAGER="my:Own")["TRITON_CACHE_MANAGER"] == "my:Own"
