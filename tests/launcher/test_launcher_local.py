"""./1.train.sbatch outside Slurm, with a training program that only counts its steps."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.projects import starts

CLEAN = {
    name: value
    for name, value in os.environ.items()
    if not name.startswith("SLURM") and name != "CUDA_VISIBLE_DEVICES"
}


def launch(project, *settings, **environment):
    return subprocess.Popen(
        ["./1.train.sbatch", *settings],
        env={**CLEAN, **environment},
        cwd=project,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def finish(process):
    output, _ = process.communicate(timeout=400)
    return process.returncode, output


def test_one_process_on_a_cpu_with_the_settings_as_they_are(launcher_project):
    code, output = finish(
        launch(
            launcher_project,
            "--save_ckpt_path=runs/a b",
            "--num_steps=2",
            '--init_from=it\'s "quoted"',
        )
    )
    assert code == 0, output
    (start,) = starts(launcher_project / "runs/a b")
    assert start["words"] == [
        "--save_ckpt_path=runs/a b",
        "--num_steps=2",
        '--init_from=it\'s "quoted"',
    ]
    assert start["environment"]["WORLD_SIZE"] == "1"


@pytest.mark.slow
@pytest.mark.parametrize("chosen, count", [(None, 3), ("0,2", 2), ("", 1)])
def test_as_many_processes_as_gpus(launcher_project, tmp_path, chosen, count):
    (tmp_path / "nvidia-smi").write_text(
        "#!/bin/sh\nfor i in 1 2 3; do echo 'NVIDIA Fake 4GB'; done\n"
    )
    (tmp_path / "nvidia-smi").chmod(0o755)
    environment = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        **({} if chosen is None else {"CUDA_VISIBLE_DEVICES": chosen}),
    }
    code, output = finish(
        launch(launcher_project, "--save_ckpt_path=runs/a", "--num_steps=1", **environment)
    )
    assert code == 0, output
    assert len(starts(launcher_project / "runs/a")) == count


@pytest.mark.slow
def test_ctrl_c_commits_a_checkpoint_and_says_how_to_go_on(launcher_project):
    process = launch(launcher_project, "--save_ckpt_path=runs/a b", "--num_steps=9999")
    wait_for(launcher_project / "runs/a b/status.json")
    process.send_signal(signal.SIGINT)
    code, output = finish(process)
    assert code == 130 and "Traceback" not in output
    (committed,) = sorted((launcher_project / "runs/a b/checkpoints").glob("*/COMMIT"))[-1:]
    assert (
        output.strip().splitlines()[-1]
        == rf"to resume from {committed.parent.name}: ./1.train.sbatch --save_ckpt_path=runs/a\ b --num_steps=9999"
    )
    assert not (launcher_project / "runs/a b/STOP").exists()


@pytest.mark.slow
def test_ctrl_c_while_training_is_only_starting_is_not_lost(launcher_project):
    """A training that starts removes old requests to stop; this one must survive it."""
    node = launcher_project / "mamba_fsdp/launch/node.py"
    node.write_text(f"import os, signal\nos.kill(os.getppid(), signal.SIGINT)\n{node.read_text()}")
    code, output = finish(launch(launcher_project, "--save_ckpt_path=runs/a", "--num_steps=9999"))
    assert code == 130, output
    assert "Traceback" not in output and list(launcher_project.glob("runs/a/checkpoints/*/COMMIT"))


@pytest.mark.slow
@pytest.mark.parametrize("first", [signal.SIGHUP, signal.SIGINT])
def test_a_window_that_closes_twice_over_waits_for_the_checkpoint(launcher_project, first):
    """Kernel and shell both say so, and it may happen after Ctrl-C."""
    process = launch(
        launcher_project, "--save_ckpt_path=runs/a", "--num_steps=9999", FAKE_COMMIT_SECONDS="2"
    )
    wait_for(launcher_project / "runs/a/status.json")
    process.send_signal(first)
    wait_for(launcher_project / "runs/a/STOP")
    process.send_signal(signal.SIGHUP)
    code, output = finish(process)
    assert code == 130 and output.count("stopping after this step") == 1
    assert '"stopped"' in (launcher_project / "runs/a/status.json").read_text()


@pytest.mark.slow
def test_ctrl_c_twice_does_not_wait_for_the_checkpoint(launcher_project):
    process = launch(launcher_project, "--save_ckpt_path=runs/a", "--num_steps=9999", FAKE="deaf")
    wait_for(launcher_project / "runs/a/status.json")
    process.send_signal(signal.SIGINT)
    wait_for(launcher_project / "runs/a/STOP")  # at once, the two would be one
    process.send_signal(signal.SIGINT)
    code, output = finish(process)
    assert code == 130 and "Traceback" not in output


def wait_until(happened):
    end = time.monotonic() + 400
    while not happened():
        assert time.monotonic() < end, "it never came"
        time.sleep(0.05)


def wait_for(path):
    wait_until(path.exists)


def states(project):
    """The states of the ranks that train in the project, as in /proc: T is one that stands still."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes()
            if b"multiprocessing.forkserver" in words and (folder / "cwd").samefile(project):
                state, _, _, session, *_ = (folder / "stat").read_text().rpartition(")")[2].split()
                found += [state] * (session == folder.name)  # ranks lead sessions of their own
        except OSError:
            pass
    return found


@pytest.mark.slow
def test_ctrl_z_makes_the_ranks_stand_still_until_the_job_goes_on(launcher_project):
    """They are in sessions of their own, which no terminal reaches; then everything is as before."""
    process = launch(
        launcher_project, "--save_ckpt_path=runs/a", "--num_steps=9999", PROCESSES_PER_NODE="2"
    )
    wait_until(lambda: len(starts(launcher_project / "runs/a")) == 2)
    for _ in range(2):
        process.send_signal(signal.SIGTSTP)
        wait_until(lambda: states(launcher_project) == ["T", "T"])
        assert os.waitid(os.P_PID, process.pid, os.WSTOPPED), (
            "a shell sees that the job has stopped"
        )
        process.send_signal(signal.SIGCONT)
        wait_until(
            lambda: len(states(launcher_project)) == 2 and "T" not in states(launcher_project)
        )
    process.send_signal(signal.SIGINT)
    code, output = finish(process)
    assert code == 130 and "Traceback" not in output and "to resume from step_" in output


def test_a_run_folder_that_can_not_be_made_is_told_in_a_line_or_two(launcher_project):
    for folder in ("/proc/nowhere", "training.py"):
        code, output = finish(
            launch(launcher_project, f"--save_ckpt_path={folder}", PROCESSES_PER_NODE="2")
        )
        assert code == 2 and len(output.splitlines()) <= 2 and not starts(launcher_project)
        assert "error: save_ckpt_path" in output and folder in output


def test_a_folder_of_something_else_is_left_alone(launcher_project):
    (launcher_project / "data/mine").mkdir(parents=True)
    (launcher_project / "data/mine/index.json").touch()
    code, output = finish(launch(launcher_project, "--save_ckpt_path=data/mine"))
    assert code == 2 and "data/mine holds a token store and no run (index.json)" in output
    assert [path.name for path in (launcher_project / "data/mine").iterdir()] == ["index.json"]


def test_a_failure_that_can_not_be_put_on_record_is_told_all_the_same(tmp_path, capsys):
    from mamba_fsdp.launch.node import put_on_record

    assert (
        put_on_record(tmp_path / "failures", 1, 0.0, "why\n", 2) == 1
        and not capsys.readouterr().err
    )
    assert put_on_record(Path("/proc/nowhere/failures"), 1, 0.0, "why\n", 2) == 2
    assert capsys.readouterr().err == "why\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    "fake, code, words",
    [
        ("mistake", 2, "error: the cause on rank"),
        ("storage", 74, "error: the cause on rank"),
        ("crash", 1, "Traceback: the cause"),
        ("killed", 137, "ran out of memory: lower batch_size."),
    ],
)
def test_the_output_ends_with_the_error_of_the_rank_that_failed_first(
    launcher_project, fake, code, words
):
    returned, output = finish(
        launch(launcher_project, "--save_ckpt_path=runs/a", FAKE=fake, PROCESSES_PER_NODE="2")
    )
    assert returned == code
    before, last = output.strip().splitlines()[-2:]
    assert "failed first" in before and words in last
    if fake == "killed":
        assert (
            '"reason": "killed: the run of process'
            in (launcher_project / "runs/a/status.json").read_text()
        )


@pytest.mark.parametrize(
    "signal_, words",
    [
        (signal.SIGKILL, "ran out of memory"),
        (signal.SIGBUS, "inspect STORE --verify"),
        (signal.SIGSEGV, "It was ended by SIGSEGV."),
    ],
)
def test_a_rank_that_died_is_explained(signal_, words):
    """A token store that is cut short under its memory map ends the rank by SIGBUS, which says nothing itself."""
    from mamba_fsdp.launch.node import describe

    assert words in describe(-signal_, Path("none"))


@pytest.mark.slow
def test_a_single_rank_says_its_error_once(launcher_project):
    """And not that of another start, whose launcher had the same number: in a container, each has."""
    script = (
        "failures=runs/a/failures/$$.0; mkdir -p $failures; "
        "echo rank 1 on elsewhere failed first. > $failures/0-17.0-elsewhere-exit9.txt; "
        "exec ./1.train.sbatch --save_ckpt_path=runs/a"
    )
    done = subprocess.run(
        ["bash", "-c", script],
        env={**CLEAN, "FAKE": "mistake"},
        cwd=launcher_project,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    code, output = done.returncode, done.stdout
    assert code == 2 and "failed first" not in output


@pytest.mark.parametrize(
    "name, value",
    [
        ("PROCESSES_PER_NODE", "all"),
        ("PROCESSES_PER_NODE", "0"),
        ("GPUS_PER_NODE", "8x"),
        ("MAX_RESTARTS", "-1"),
        ("PROFILE", "yes"),
    ],
)
def test_wrong_variables_are_refused_by_name(launcher_project, name, value):
    code, output = finish(launch(launcher_project, "--save_ckpt_path=runs/a", **{name: value}))
    assert (
        code == 2
        and output.startswith(f"error: {name}={value}: ")
        and len(output.splitlines()) == 1
    )


@pytest.mark.parametrize("value", ["1", "x"])
def test_spare_nodes_are_of_a_job(launcher_project, value):
    code, output = finish(launch(launcher_project, "--save_ckpt_path=runs/a", f"--spares={value}"))
    assert (
        code == 2
        and output.startswith(f"error: --spares={value}: ")
        and len(output.splitlines()) == 1
    )


def test_what_is_loaded_must_be_there_unless_it_is_the_run_folder(launcher_project):
    code, output = finish(
        launch(launcher_project, "--save_ckpt_path=runs/a", "--load_ckpt_path=runs/b")
    )
    assert code == 2 and len(output.splitlines()) == 1
    assert output.startswith("error: load_ckpt_path runs/b: there is no such file or folder")
    assert not (launcher_project / "runs").exists() and not (launcher_project / "data").exists()


@pytest.mark.slow
def test_a_dry_run_makes_no_data(launcher_project):
    code, output = finish(launch(launcher_project, "--save_ckpt_path=runs/a", "--dry_run=true"))
    assert code == 0 and not (launcher_project / "data").exists()


def test_gpus_per_node_is_another_name_for_the_number_of_processes(launcher_project):
    script = (
        "source mamba_fsdp/launch/environment.sh; choose_process_count; echo $PROCESSES_PER_NODE"
    )

    def ask(**environment):
        done = subprocess.run(
            ["bash", "-euc", script],
            cwd=launcher_project,
            env={**CLEAN, **environment},
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        return done.returncode, done.stdout.splitlines()

    assert ask(GPUS_PER_NODE="4") == (0, ["GPUS_PER_NODE=4: the same as PROCESSES_PER_NODE=4", "4"])
    assert ask(GPUS_PER_NODE="4", PROCESSES_PER_NODE="4")[0] == 0
    assert ask(GPUS_PER_NODE="4", PROCESSES_PER_NODE="2") == (
        2,
        ["error: GPUS_PER_NODE=4 and PROCESSES_PER_NODE=2 are two names for one thing"],
    )


@pytest.mark.parametrize(
    "damage",
    [
        shutil.rmtree,
        lambda venv: (venv / ".complete").unlink(),
        lambda venv: (venv / "bin/python").unlink(),
    ],
)
def test_without_a_whole_venv_the_remedy_is_named(launcher_project, damage):
    damage(launcher_project / ".venv")
    code, output = finish(launch(launcher_project, "--save_ckpt_path=runs/a"))
    assert code == 2
    assert (
        output.startswith("error: ")
        and "./0.create_env.sh" in output
        and len(output.splitlines()) == 1
    )


def test_a_venv_of_other_requirements_is_refused(launcher_project):
    with open(launcher_project / "requirements/cpu.txt", "a") as file:
        file.write("surprise==1\n")
    for settings in (
        ["--save_ckpt_path=runs/a"],
        [],
    ):  # without any it would first make the demo's corpus
        code, output = finish(launch(launcher_project, *settings))
        assert code == 2 and output.startswith("error: ") and "run ./0.create_env.sh" in output


def test_a_bad_setting_is_one_line(launcher_project):
    code, output = finish(launch(launcher_project, "--num_stepss=3"))
    assert code == 2 and len(output.splitlines()) == 1 and "did you mean num_steps" in output


@pytest.mark.slow
def test_called_from_another_folder_paths_are_seen_from_there(launcher_project, tmp_path):
    """Whatever lies in that folder is no part of the program, where Python can be told so."""
    if sys.version_info >= (3, 11):
        (tmp_path / "config.py").write_text("raise SystemExit('not mine')\n")
    (tmp_path / "my.yaml").write_text("save_ckpt_path: runs/a\nnum_steps: 9999\n")
    process = subprocess.Popen(
        [launcher_project / "1.train.sbatch", "--config=my.yaml", "--save_ckpt_path=runs/a"],
        env=CLEAN,
        cwd=tmp_path,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    wait_for(tmp_path / "runs/a/status.json")
    process.send_signal(signal.SIGINT)
    code, output = finish(process)
    (start,) = starts(tmp_path / "runs/a")
    assert code == 130 and start["cwd"] == str(tmp_path)
    assert (
        tmp_path / "data/builtin/train/index.json"
    ).read_text() == f"builtin {tmp_path}/data/builtin"
    assert not (launcher_project / "runs").exists() and not (launcher_project / "data").exists()
    name = str(launcher_project / "1.train.sbatch").replace(" ", "\\ ")
    assert (
        output.strip()
        .splitlines()[-1]
        .endswith(f": {name} --config=my.yaml --save_ckpt_path=runs/a")
    )


def test_what_it_says_at_the_end_fits_a_terminal(launcher_project):
    script = (
        "source ./1.train.sbatch; source mamba_fsdp/launch/environment.sh; python=true; show_demo"
    )
    done = subprocess.run(
        ["bash", "-c", script], cwd=launcher_project, capture_output=True, text=True
    )
    rows = done.stdout.splitlines()
    assert len(rows) > 5 and all(len(row) < 80 for row in rows), rows


@pytest.mark.slow
def test_no_scratch_is_left_behind(launcher_project, tmp_path):
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    for fake in ("", "crash"):
        finish(
            launch(
                launcher_project,
                "--save_ckpt_path=runs/a",
                "--num_steps=3",
                FAKE=fake,
                TMPDIR=str(scratch),
            )
        )
    assert not list(scratch.iterdir())
