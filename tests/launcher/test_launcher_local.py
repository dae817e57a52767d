"""./1.train.sbatch outside Slurm, with a training program that only counts its steps."""

import os
import shutil
import signal
import subprocess
from collections import Counter
from pathlib import Path

import pytest

from tests.support.processes import finish, run_program, wait_until, write_program
from tests.support.projects import starts
from tests.support.tiny import TINY, as_words

RUN = "--save_ckpt_path=runs/a"
ENDLESS = [RUN, "--num_steps=9999"]


def launch(project, *settings, cwd=None, **environment):
    return subprocess.Popen(
        [project / "1.train.sbatch" if cwd else "./1.train.sbatch", *settings],
        env={**os.environ, **environment},
        cwd=cwd or project,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def train(project, *settings, **environment):
    """(exit code, what was said)"""
    return finish(launch(project, *settings, **environment))


@pytest.mark.slow
def test_a_rank_for_each_gpu_gets_the_settings_as_they_are(launcher_project, tmp_path):
    smi = "#!/bin/sh\nfor i in 1 2 3; do echo 'NVIDIA Fake 4GB'; done\n"
    write_program(tmp_path / "nvidia-smi", smi)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    (launcher_project / 'it\'s "quoted"').touch()
    words = ["--save_ckpt_path=runs/a b", "--num_steps=1", '--init_from=it\'s "quoted"']
    code, output = train(launcher_project, *words, **environment)
    assert code == 0, output
    begun = starts(launcher_project / "runs/a b")
    settings = {"save_ckpt_path": "runs/a b", "num_steps": "1", "init_from": 'it\'s "quoted"'}
    assert [start["settings"] for start in begun] == [settings] * 3


COUNTING = """

_resolve = resolve_settings

def resolve_settings(*words, **more):
    with open("resolutions", "a") as file:
        file.write("one\\n")
    return _resolve(*words, **more)
"""


@pytest.mark.slow
def test_a_launch_resolves_its_settings_once(launcher_project, project):
    """The ranks of the real training read what it came to."""
    shutil.copy(project / "training.py", launcher_project)
    module = launcher_project / "mamba_fsdp/settings/resolve.py"
    module.write_text(module.read_text() + COUNTING)
    words = as_words({**TINY, "eval_interval": 0, "eval_batches": -1, "use_dummy_dataset": True})
    code, output = train(launcher_project, RUN, *words, PROCESSES_PER_NODE="2")
    assert code == 0 and "fsdp on 2 x cpu" in output, output
    assert (launcher_project / "resolutions").read_text() == "one\n"


# It starts no rank until the script has done something about the signal: asked for a stop, or ended it.
TELLS = """
import os, sys, time
os.kill(os.getppid(), {number})
while not os.path.exists(sys.argv[1] + "/STOP"):
    time.sleep(0.05)
"""


def tell_the_launcher_while_it_starts(project, number):
    node = project / "mamba_fsdp/launch/node.py"
    node.write_text(TELLS.format(number=int(number)) + node.read_text())


@pytest.mark.slow
def test_ctrl_c_before_the_first_step_ends_at_once(launcher_project):
    """Also where an earlier run has left its status."""
    (launcher_project / "runs/a").mkdir(parents=True)
    (launcher_project / "runs/a/status.json").write_text('{"status": "running", "reason": ""}')
    tell_the_launcher_while_it_starts(launcher_project, signal.SIGINT)
    code, output = train(launcher_project, *ENDLESS)
    assert code == 130 and not starts(launcher_project / "runs/a")
    last = output.splitlines()[-2:]
    assert last == ["", "stopped    before the first step of this start: nothing was lost"]


@pytest.mark.slow
def test_a_request_commits_a_checkpoint_and_says_how_to_resume(launcher_project):
    """One that comes while the training only starts, too; an old one is none."""
    (launcher_project / "runs/a b").mkdir(parents=True)
    (launcher_project / "runs/a b/STOP").write_text("old")
    tell_the_launcher_while_it_starts(launcher_project, signal.SIGTERM)
    code, output = train(launcher_project, "--save_ckpt_path=runs/a b", "--num_steps=9999")
    run = launcher_project / "runs/a b"
    assert code == 130 and "Traceback" not in output
    newest = sorted(run.glob("checkpoints/*/COMMIT"))[-1].parent.name
    how = rf"to resume from {newest}: ./1.train.sbatch --save_ckpt_path=runs/a\ b --num_steps=9999"
    assert output.splitlines()[-1] == how
    assert not (run / "STOP").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    "first, second, fake",
    [("SIGINT", "SIGHUP", ""), ("SIGINT", "SIGINT", "deaf")],
)
def test_only_ctrl_c_twice_does_not_wait_for_the_checkpoint(launcher_project, first, second, fake):
    """Of a window that closes kernel and shell both tell, and it may close after Ctrl-C."""
    process = launch(launcher_project, *ENDLESS, FAKE=fake, FAKE_COMMIT_SECONDS="2")
    run = launcher_project / "runs/a"
    wait_until((run / "status.json").exists)
    process.send_signal(signal.Signals[first])
    wait_until((run / "STOP").exists)
    process.send_signal(signal.Signals[second])
    code, output = finish(process)
    assert code == 130 and output.count("stopping after this step") == 1
    assert "Traceback" not in output
    is_stopped = '"stopped"' in (run / "status.json").read_text()
    assert is_stopped == (not fake)


@pytest.mark.slow
@pytest.mark.parametrize(
    "fake, ranks, code, words",
    [
        ("mistake", 1, 2, ""),
        ("storage", 2, 74, "error: the cause on rank"),
        ("killed", 2, 137, "ran out of memory: lower batch_size."),
    ],
)
def test_the_output_ends_with_the_error_of_the_rank_that_failed_first(
    launcher_project, tmp_path, fake, ranks, code, words
):
    """A single rank has said it itself, right above. No scratch is left behind."""
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    environment = {"PROCESSES_PER_NODE": str(ranks), "TMPDIR": str(scratch)}
    if fake != "mistake":  # after which ranks would not start again anyway
        environment["MAX_RESTARTS"] = "0"
    returned, output = train(launcher_project, RUN, FAKE=fake, **environment)
    assert returned == code
    assert output.count("failed first") == (ranks > 1)
    if ranks > 1:
        before, last = output.splitlines()[-2:]
        assert "failed first" in before and words in last
    tries = Counter(start["rank"] for start in starts(launcher_project / "runs/a"))
    assert max(tries.values()) == 1
    if fake == "killed":
        status = (launcher_project / "runs/a/status.json").read_text()
        assert "exited without a status" in status
    assert not list(scratch.iterdir())


COMMITS_AND_DIES = """
import pathlib, sys
begun = pathlib.Path("begun")
begun.write_text(begun.read_text() + "!" if begun.exists() else "!")
count = len(begun.read_text())
if count < 3:
    pathlib.Path(f"runs/a/checkpoints/step_{count:08d}").mkdir(parents=True)
    pathlib.Path(f"runs/a/checkpoints/step_{count:08d}/COMMIT").touch()
sys.exit(1)
"""


@pytest.mark.slow
def test_ranks_start_again_in_place_as_long_as_there_are_new_checkpoints(launcher_project):
    (launcher_project / "training.py").write_text(COMMITS_AND_DIES)
    code, output = train(launcher_project, RUN)
    assert code == 1 and (launcher_project / "begun").read_text() == "!!!"
    restarts = [line for line in output.splitlines() if line.startswith("restarts   ")]
    assert len(restarts) == 2
    for line in restarts:
        assert line.startswith("restarts   the ranks after the loss of rank 0 on ")
        assert line.endswith(": It exited with code 1; its output is above.")


@pytest.mark.parametrize(
    "settings, environment, said",
    [
        (["--save_ckpt_path=/proc/nowhere"], {}, "error: save_ckpt_path"),
        (["--save_ckpt_path=training.py"], {}, "error: save_ckpt_path"),
        (["--save_ckpt_path=store"], {}, "store is not a run folder (it holds index.json)"),
        ([RUN, "--load_ckpt_path=runs/b"], {}, "error: runs/b: there is no such"),
        ([RUN, "--init_from=runs/b"], {}, "error: runs/b: there is no such"),
        ([RUN, "--dataset_path=runs/b"], {}, "error: runs/b: no such folder"),
        (["--num_stepss=3"], {}, "did you mean num_steps"),
        ([RUN], {"PROCESSES_PER_NODE": "all"}, "error: PROCESSES_PER_NODE=all: "),
        ([RUN], {"GPUS_PER_NODE": "0"}, "error: GPUS_PER_NODE=0: "),
        ([RUN], {"GPUS_PER_NODE": "4", "PROCESSES_PER_NODE": "2"}, "mean the same; give one"),
        ([RUN], {"MAX_RESTARTS": "-1"}, "error: MAX_RESTARTS=-1: "),
        ([RUN], {"PROFILE": "yes"}, "error: PROFILE=yes: "),
    ],
)
def test_mistakes_are_told_in_a_line_or_two(launcher_project, settings, environment, said):
    (launcher_project / "store").mkdir()
    (launcher_project / "store/index.json").touch()
    code, output = train(launcher_project, *settings, **environment)
    assert code == 2 and said in output and len(output.splitlines()) <= 2
    assert not (launcher_project / "runs").exists() and not (launcher_project / "data").exists()
    assert [path.name for path in (launcher_project / "store").iterdir()] == ["index.json"]


@pytest.mark.slow
def test_a_dry_run_makes_no_data(launcher_project):
    code, _ = train(launcher_project, RUN, "--dry_run=true", GPUS_PER_NODE="1")
    assert code == 0 and not (launcher_project / "data").exists()


def add_requirement(venv):
    with open(venv.parent / "requirements/cpu.txt", "a") as file:
        file.write("surprise==1\n")


@pytest.mark.parametrize(
    "damage",
    [
        shutil.rmtree,
        lambda venv: (venv / ".complete").unlink(),
        lambda venv: (venv / "bin/python").unlink(),
        add_requirement,
    ],
)
def test_without_a_whole_venv_the_remedy_is_named(launcher_project, damage):
    damage(launcher_project / ".venv")
    code, output = train(launcher_project, RUN)
    assert code == 2 and len(output.splitlines()) <= 2
    last = output.splitlines()[-1]
    assert last.startswith("error: ") and "./0.create_env.sh" in last


@pytest.mark.slow
def test_called_from_another_folder_paths_are_seen_from_there(launcher_project, tmp_path):
    (tmp_path / "my.yaml").write_text("save_ckpt_path: runs/a\nnum_steps: 2\n")
    process = launch(launcher_project, "--config=my.yaml", RUN, "--num_steps=2", cwd=tmp_path)
    code, output = finish(process)
    assert code == 0, output
    (start,) = starts(tmp_path / "runs/a")
    assert start["cwd"] == str(tmp_path)
    assert output.count(f"\nrun        {tmp_path}/runs/a\n") == 1
    made = tmp_path / "data/builtin"
    assert (made / "train/index.json").read_text() == "builtin data/builtin"
    assert not (launcher_project / "runs").exists() and not (launcher_project / "data").exists()


def test_what_it_says_at_the_end_fits_a_terminal(launcher_project):
    source = "source ./1.train.sbatch; source mamba_fsdp/launch/environment.sh; "
    done = run_program("bash", "-c", f"{source} python=true; show_demo", cwd=launcher_project)
    rows = done.stdout.splitlines()
    assert len(rows) > 5 and all(len(row) < 80 for row in rows), rows


def states(project):
    """The states of the ranks that train in the project, as in /proc: T is one that stands still."""
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
def test_ctrl_z_makes_the_ranks_stand_still_until_the_job_goes_on(launcher_project):
    """They are in sessions of their own, which no terminal reaches; then everything is as before."""
    process = launch(launcher_project, *ENDLESS, PROCESSES_PER_NODE="2")
    wait_until(lambda: len(starts(launcher_project / "runs/a")) == 2)
    for _ in range(2):
        process.send_signal(signal.SIGTSTP)
        wait_until(lambda: states(launcher_project) == ["T", "T"])
        assert os.waitid(os.P_PID, process.pid, os.WSTOPPED), (
            "a shell sees that the job has stopped"
        )
        process.send_signal(signal.SIGCONT)
        wait_until(lambda: "T" not in states(launcher_project))
    process.send_signal(signal.SIGINT)
    code, output = finish(process)
    assert code == 130 and "Traceback" not in output and "to resume from step_" in output
