"""Tests ./1.train.sbatch outside Slurm, with a training program that only counts its steps."""

import os
import signal
import subprocess
from pathlib import Path

import pytest

from tests.support.processes import finish, run_program, wait_until, write_program
from tests.support.projects import MANY_STEPS, starts

RUN = "--save_ckpt_path=runs/a"
ENDLESS = [RUN, MANY_STEPS]


def launch(project, *settings, **environment):
    return subprocess.Popen(
        ["./1.train.sbatch", *settings],
        env={**os.environ, **environment},
        cwd=project,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def train(project, *settings, **environment):
    """Runs a training to its end. Returns (exit code, output)."""
    return finish(launch(project, *settings, **environment))


def wait_for_status(run):
    """Waits until the run's status.json is complete."""
    status = run / "status.json"
    wait_until(lambda: status.exists() and '"running"' in status.read_text())


@pytest.mark.slow
def test_each_gpu_has_a_rank_with_unchanged_settings_and_the_first_error_is_printed_last(
    launcher_project, tmp_path
):
    """The launcher starts a rank for each GPU, passes settings with spaces and quotes unchanged, ends with the first
    error, and removes its temporary folder."""
    smi = "#!/bin/sh\nfor i in 1 2 3; do echo 'NVIDIA Fake 4GB'; done\n"
    write_program(tmp_path / "commands/nvidia-smi", smi)
    (tmp_path / "scratch").mkdir()
    environment = {
        "PATH": f"{tmp_path}/commands:{os.environ['PATH']}",
        "TMPDIR": str(tmp_path / "scratch"),
        "MAX_RESTARTS": "0",
        "FAKE": "storage",
    }
    (launcher_project / 'it\'s "quoted".pth').touch()
    words = ["--save_ckpt_path=runs/a b", MANY_STEPS, '--init_from=it\'s "quoted".pth']
    code, output = train(launcher_project, *words, **environment)
    begun = starts(launcher_project / "runs/a b")
    settings = {"save_ckpt_path": "runs/a b", "num_steps": MANY_STEPS.partition("=")[2]}
    settings["init_from"] = 'it\'s "quoted".pth'
    assert [start["settings"] for start in begun] == [settings] * 3
    before, last = output.splitlines()[-2:]
    assert code == 74 and before.startswith("rank 2 on ") and output.count("failed first") == 1
    assert last == "error: the cause on rank 2"
    assert not list((tmp_path / "scratch").iterdir())


INTERRUPTED = """
def resolve_settings(*_):
    import os, signal
    for process in (os.getppid(), os.getpid()):  # a terminal signals both processes
        os.kill(process, signal.SIGINT)
"""


def test_ctrl_c_while_the_settings_are_read_ends_at_once(launcher_project):
    with open(launcher_project / "mamba_fsdp/settings/resolve.py", "a") as module:
        module.write(INTERRUPTED)
    code, output = train(launcher_project, *ENDLESS)
    assert code in (130, -signal.SIGINT)  # a shell reports 130 in both cases
    assert output == "\nstopped by Ctrl-C\n", output
    assert "Traceback" not in output and not (launcher_project / "runs").exists()


@pytest.mark.slow
def test_paths_are_relative_to_the_working_directory(launcher_project, tmp_path):
    """Relative paths in settings begin at the working directory, even if it is not the project folder.

    The script has no execute permission, as after unpacking a ZIP file. PYTHONHOME is set, as by some module files, and
    TMPDIR does not exist.
    """
    script = launcher_project / "1.train.sbatch"
    script.chmod(0o644)
    (tmp_path / "my.yaml").write_text("save_ckpt_path: runs/a\nnum_steps: 2\n")
    odd = {"PYTHONHOME": "/nonsense", "TMPDIR": str(tmp_path / "nowhere")}
    done = run_program("bash", script, "--config=my.yaml", cwd=tmp_path, **odd)
    assert done.returncode == 0, done.stderr
    (start,) = starts(tmp_path / "runs/a")
    assert start["cwd"] == str(tmp_path)
    assert (tmp_path / "data/builtin/asked").read_text() == "builtin data/builtin"
    assert not (launcher_project / "runs").exists() and not (launcher_project / "data").exists()


# This code is inserted at the start of a program. It sends a signal to the launcher, and waits until the launcher
# requests a stop or ends this process.
TELLS = """
import os, sys, time
os.kill(os.getppid(), {number})
import glob
while not glob.glob(sys.argv[1] + "/starts/*/STOP"):
    time.sleep(0.05)
"""
BEFORE_THE_FIRST_STEP = [
    ("get_dataset.py", signal.SIGINT),
    ("mamba_fsdp/launch/node.py", signal.SIGINT),
    ("mamba_fsdp/launch/node.py", signal.SIGTERM),
]


@pytest.mark.slow
@pytest.mark.parametrize("program, number", BEFORE_THE_FIRST_STEP)
def test_a_signal_before_the_first_step_ends_at_once(launcher_project, program, number):
    """A signal before the first step ends the launcher at once, with the exit code 128 + signal, even if the status of
    an earlier start is `running`."""
    (launcher_project / "runs/a").mkdir(parents=True)
    (launcher_project / "runs/a/status.json").write_text('{"status": "running", "reason": ""}')
    file = launcher_project / program
    file.write_text(TELLS.format(number=int(number)) + file.read_text())
    code, output = train(launcher_project, *ENDLESS)
    assert code == 128 + number and not starts(launcher_project / "runs/a")
    last = output.splitlines()[-2:]
    assert last == ["", "stopped    before the first step of this start: nothing was lost"]


@pytest.mark.slow
def test_a_request_to_stop_commits_a_checkpoint_and_prints_how_to_resume(launcher_project):
    """After SIGTERM, the run commits a checkpoint, and the last line contains the command that resumes. A STOP file
    that existed before the start is ignored."""
    run = launcher_project / "runs/a b"
    run.mkdir(parents=True)
    (run / "STOP").write_text("old")
    process = launch(launcher_project, "--save_ckpt_path=runs/a b", MANY_STEPS)
    wait_for_status(run)
    process.send_signal(signal.SIGTERM)
    code, output = finish(process)
    assert code == 143 and "Traceback" not in output
    newest = sorted(run.glob("checkpoints/*/COMMIT"))[-1].parent.name
    how = f"to resume from {newest}: ./1.train.sbatch '--save_ckpt_path=runs/a b' {MANY_STEPS}"
    assert output.splitlines()[-1] == how
    assert not (run / "starts").exists()


@pytest.mark.slow
def test_ctrl_c_twice_does_not_wait_for_the_checkpoint(launcher_project):
    process = launch(launcher_project, *ENDLESS, FAKE="deaf")
    run = launcher_project / "runs/a"
    wait_for_status(run)
    process.send_signal(signal.SIGINT)
    wait_until(lambda: list(run.glob("starts/*/STOP")))
    process.send_signal(signal.SIGINT)
    code, output = finish(process)
    assert code == 130 and output.count("stopping   after the current step") == 1
    assert "Traceback" not in output and '"stopped"' not in (run / "status.json").read_text()


def assert_stopped(project, reason):
    """Waits until the run has stopped because of this signal with a checkpoint. The launcher can
    exit earlier.
    """
    status = project / "runs/a/status.json"
    wait_until(lambda: '"stopped"' in status.read_text())
    assert f'"reason": "{reason}"' in status.read_text()
    assert list(project.glob("runs/a/checkpoints/step_*/COMMIT"))


@pytest.mark.slow
@pytest.mark.parametrize("reason, reader", [("SIGHUP", ""), ("SIGINT", " | tee log")])
def test_a_closed_terminal_and_a_dead_reader_stop_the_run_with_a_checkpoint(
    launcher_project, terminal, reason, reader
):
    """The run stops with a checkpoint if its terminal closes, or if Ctrl-C also ends the reader of its output. In
    `./1.train.sbatch | tee log`, Ctrl-C ends tee, so later output has no reader."""
    command = f"./1.train.sbatch {' '.join(ENDLESS)} 2>&1{reader}"
    process = terminal.start(["bash", "-c", command], cwd=launcher_project)
    wait_for_status(launcher_project / "runs/a")
    if reader:
        terminal.type("\x03")
    else:
        terminal.close()
    process.wait(400)
    assert_stopped(launcher_project, reason)


COMMITS_AND_DIES = """
import pathlib, sys
checkpoint = pathlib.Path("runs/a/checkpoints/step_00000001")
if checkpoint.exists():
    print("error: a mistake", file=sys.stderr)
    sys.exit(2)
checkpoint.mkdir(parents=True)
(checkpoint / "COMMIT").touch()
sys.exit(1)
"""


@pytest.mark.slow
def test_a_rank_that_fails_is_restarted_in_place_unless_the_user_made_a_mistake(
    launcher_project,
):
    """A rank that fails is restarted by its launcher, but not after a user error. The message of a user error is the
    last line of the output. test_decision.py tests when ranks are restarted."""
    (launcher_project / "training.py").write_text(COMMITS_AND_DIES)
    code, output = train(launcher_project, RUN)
    (again,) = [line for line in output.splitlines() if line.startswith("restarts   ")]
    assert again.startswith("restarts   the ranks after the loss of rank 0 on ")
    assert again.endswith(": It exited with code 1; its output is above.")
    assert code == 2 and output.splitlines()[-1] == "error: a mistake"


# {(shell command in the project, command-line argument): part of the message}
MISTAKES = {
    ("mkdir store; touch store/index.json", "--save_ckpt_path=store"): "store is not a run folder",
    ("true", "--num_stepss=3"): "did you mean num_steps",
    ("true", "--save_ckpt_path=training.py"): "error: save_ckpt_path",
}


@pytest.mark.parametrize("done, typed", MISTAKES)
def test_mistakes_are_reported_in_a_line_or_two(launcher_project, done, typed):
    """A user error is reported in at most two lines, before any file is made. test_host.py and
    tests/verbs/test_refused_words.py contain more user errors."""
    subprocess.run(done, shell=True, check=True, cwd=launcher_project)
    before = sorted(launcher_project.iterdir())
    code, output = train(launcher_project, typed)
    assert code == 2, output
    assert MISTAKES[done, typed] in output and len(output.splitlines()) <= 2
    assert sorted(launcher_project.iterdir()) == before


def states(project):
    """Returns the process states of the project's ranks as in /proc; T is a stopped process."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes().split(b"\0")
            if words[1:3] == [b"-u", bytes(project / "training.py")]:
                found.append((folder / "stat").read_text().rpartition(")")[2].split()[0])
        except OSError:
            pass
    return found


@pytest.mark.slow
def test_ctrl_z_suspends_the_ranks_until_the_job_continues(launcher_project):
    """Ctrl-Z stops the processes of the ranks, and SIGCONT continues them. The ranks have their own sessions, so the
    terminal's signals do not reach them directly.

    After that, Ctrl-C stops the run with a checkpoint, even if the window closes meanwhile, for which both the kernel
    and the shell send SIGHUP.
    """
    environment = {"PROCESSES_PER_NODE": "2", "FAKE_COMMIT_SECONDS": "2"}
    process = launch(launcher_project, *ENDLESS, **environment)
    wait_until(lambda: len(starts(launcher_project / "runs/a")) == 2)
    process.send_signal(signal.SIGTSTP)
    wait_until(lambda: states(launcher_project) == ["T", "T"])
    assert os.waitid(os.P_PID, process.pid, os.WSTOPPED), "a shell sees that it has stopped"
    process.send_signal(signal.SIGCONT)
    wait_until(lambda: "T" not in states(launcher_project))
    process.send_signal(signal.SIGINT)
    wait_until(lambda: list(launcher_project.glob("runs/a/starts/*/STOP")))
    process.send_signal(signal.SIGHUP)
    code, output = finish(process)
    assert code == 130 and output.count("stopping   after the current step") == 1
    assert "Traceback" not in output and "to resume from step_" in output
    assert_stopped(launcher_project, "SIGINT")


NAMELESS = 'hostname no-such-name; exec "$@"'
# {command that makes the network: part of the error message, or ""}
NETWORKS = {
    ("unshare", "--uts", "--net", "bash", "-c", "ip link set lo up; " + NAMELESS, ""): "",
    ("unshare", "--uts", "--net", "bash", "-c", NAMELESS, ""): "enable it: ip link set lo up",
    (
        *("unshare", "--uts", "--net", "bash", "-c"),
        "ip link set lo up; ip addr del 127.0.0.1/8 dev lo; " + NAMELESS,
        "",
    ): "if it has no such address: ip addr add 127.0.0.1/8 dev lo",
}


@pytest.mark.slow
@pytest.mark.torch22
@pytest.mark.parametrize("network", NETWORKS)
def test_the_ranks_of_one_machine_connect_even_if_its_name_has_no_address(
    launcher_project, network
):
    """The ranks of one machine connect even if its host name can't be resolved. By default, torchrun tries for minutes
    to reach the machine by its name."""
    if run_program(*network, "true").returncode:
        pytest.skip("this user may not make such a network")
    command = [*network, "timeout", "--kill-after=5", "60", "./1.train.sbatch"]
    done = run_program(
        *command, "--save_ckpt_path=run", cwd=launcher_project, PROCESSES_PER_NODE="2"
    )
    refusal = NETWORKS[network]
    assert done.returncode == (2 if refusal else 0), done.stdout + done.stderr
    assert refusal in done.stderr
