"""Tests mamba_fsdp.launch.slurm: its calls of Slurm's commands, and how it parses their output. tests/slurm runs a real
Slurm."""

import os
import time

import pytest

from mamba_fsdp.launch import slurm
from mamba_fsdp.launch.host import LaunchError
from tests.support.processes import write_program

JOB = slurm.Job("77", "70_3", 2, ["node1", "node2"])


@pytest.fixture
def says(tmp_path, monkeypatch):
    """Returns a function says(command, *answers). The function replaces a command of Slurm by a program that prints the
    answers one after the other, one at each call. Later calls print the last answer. A call whose answer is None fails.
    says.asked(command) returns the arguments of each call."""
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(time, "sleep", lambda seconds: None)

    def say(command, *answers):
        for number, answer in enumerate(answers, 1):
            if answer is not None:
                (tmp_path / f"{command}.{number}").write_text(answer)
        script = f"""#!/bin/sh
cd {tmp_path}
echo "$*" >> {command}.asked
number=$(wc -l < {command}.asked)
[ $number -lt {len(answers)} ] || number={len(answers)}
cat {command}.$number
"""
        write_program(tmp_path / command, script)

    say.asked = lambda command: (tmp_path / f"{command}.asked").read_text().splitlines()
    return say


def test_a_heterogeneous_job_is_refused(monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    monkeypatch.setenv("SLURM_HET_SIZE", "2")
    with pytest.raises(LaunchError, match="heterogeneous job"):
        slurm.this_job()


def test_a_step_asks_for_all_gpus_of_the_nodes_that_it_names(monkeypatch, tmp_path):
    """A step requests all GPUs of its nodes. On HyperPod, Slurm itself restarts the step. steps.yaml contains the other
    arguments."""
    monkeypatch.delenv("SLURM_GPUS_ON_NODE", raising=False)
    assert slurm.srun_on_nodes(JOB.nodes)[-1] == "--label"
    monkeypatch.setenv("SLURM_GPUS_ON_NODE", "8")
    monkeypatch.setattr(slurm, "HYPERPOD_FOLDER", str(tmp_path))
    assert slurm.srun_on_nodes(JOB.nodes)[-2:] == ["--gpus-per-node=8", "--auto-resume=1"]


def test_options_of_the_shell_do_not_reach_slurms_commands(monkeypatch):
    options = [
        "SLURM_TIME_FORMAT",
        "SLURM_NO_KILL",
        "SLURM_NTASKS_PER_NODE",
        "SQUEUE_FORMAT",
        "SINFO_ALL",
    ]
    facts = [
        "SLURM_JOB_ID",
        "SLURM_CONF",
        "SLURM_MEM_PER_NODE",
        "SLURM_GPUS_ON_NODE",
        "SLURMD_NODENAME",
    ]
    for name in options + facts:
        monkeypatch.setenv(name, "7")
    slurm.clear_option_variables()
    assert not os.environ.keys() & set(options)
    assert os.environ.keys() >= set(facts)


def test_a_job_id_that_is_left_over_in_a_shell_is_refused(monkeypatch, says):
    """The variables of a job that has ended are refused, with and without a node list. They can be left over in a
    shell, for example after salloc has expired."""
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    monkeypatch.delenv("SLURM_JOB_NODELIST", raising=False)
    says("squeue", "JOBID\n77\n", "JOBID\n76\n", "JOBID\n")
    for _ in range(3):
        with pytest.raises(LaunchError, match="unset SLURM_JOB_ID"):
            slurm.check_is_alive(slurm.this_job())
        monkeypatch.setenv("SLURM_JOB_NODELIST", "node[1-2]")
        says("scontrol", "node1\nnode2\n")
    assert len(says.asked("squeue")) == 3


def test_the_job_of_a_script_or_of_a_salloc_shell_is_found(monkeypatch, says):
    """A running job is recognised by its variables, even if the controller does not answer."""
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "node[1-2]")
    says("scontrol", "node1\nnode2\n")
    says("squeue", "JOBID\n76\n77\n", None)
    job = slurm.this_job()
    assert job == slurm.Job("77", "77", 0, ["node1", "node2"])
    for _ in range(2):
        slurm.check_is_alive(job)


def test_a_missing_answer_does_not_mean_that_there_is_no_job(says):
    says("squeue", "77\n78\n77\n", None)
    assert slurm.jobs_of_this_user("RUNNING") == {"77", "78"}
    assert slurm.jobs_of_this_user("RUNNING") is None


def test_a_start_has_run_since_and_ends_at_the_times_that_slurm_shows(says):
    """The run time and the remaining time of a job are computed from the times that scontrol shows. A job without a
    time limit has no end time."""
    now = time.time()
    shown = "   StartTime={} EndTime={} Deadline=N/A\n"
    at = [time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(now + add)) for add in (-60, 600)]
    says("scontrol", shown.format(*at), shown.format(*at), shown.format("Unknown", "Unknown"))
    assert slurm.seconds_left(JOB) == pytest.approx(600, abs=100)
    assert slurm.seconds_run(JOB) == pytest.approx(60, abs=100)
    assert slurm.seconds_left(JOB) is None
    assert slurm.seconds_run(JOB) == float("inf")


@pytest.mark.parametrize(
    "state, answers, is_queued, tries",
    [
        ("RUNNING", [None, ""], True, 2),
        ("RUNNING", [None], False, 5),
        ("PENDING", [None], True, 0),
        ("COMPLETING", [None], True, 0),
        ("REQUEUE_HOLD", [None], True, 0),
    ],
)
def test_a_job_is_queued_again_once(says, state, answers, is_queued, tries):
    """A job is queued again by at most five attempts, because an overloaded controller can accept a later attempt. A
    job that Slurm itself has queued again is not changed."""
    says("squeue", state)
    says("scontrol", *answers)
    assert slurm.requeue_job(JOB) == is_queued
    if tries:
        assert says.asked("scontrol") == ["requeue 70_3"] * tries


@pytest.mark.parametrize(
    "listed, expected",
    [
        ("node1 idle\nnode3 alloc\n", "update JobId=70_3 NumNodes=2 ExcNodeList=node2,node9"),
        ("node1 idle\nnode3 down*\n", "update JobId=70_3 NumNodes=2"),
    ],
)
def test_the_next_start_does_not_get_a_lost_node_if_there_are_others(says, listed, expected):
    """A job that is queued again excludes lost nodes if there are enough others, and requests as many nodes as before,
    because the job can have released some of its nodes. Nodes that the user has excluded stay excluded."""
    says("squeue", "RUNNING")
    says("sinfo", listed)
    says("scontrol", "", "   ReqNodeList=(null) ExcNodeList=node9\n", "node9\n")
    assert slurm.requeue_job(JOB, ["node2"])
    assert says.asked("scontrol")[-1] == expected


def test_steps_on_a_lost_node_are_killed_but_not_the_guards(says):
    says("squeue", "77.0 mamba-guard node[1-2]\n77.1 bash node[1-2]\n77.2 bash node1\n")
    says("scontrol", "node1\nnode2\n", "node1\n")
    says("scancel", "")
    slurm.kill_steps_on(JOB, "node2")
    assert says.asked("scancel") == ["--ctld --signal=KILL 77.1"]


CONFIG = "SelectTypeParameters = CR_CORE_MEMORY\n"
NODE = "   RealMemory=8000 AllocMem=0\n"


@pytest.mark.parametrize(
    "config, given, gives",
    [
        (CONFIG, "mem=10000M", "5,000"),
        (CONFIG, "mem=14G", "7,168"),
        (CONFIG, "mem=1T", ""),
        ("SelectTypeParameters = CR_CORE\n", "mem=10M", ""),
    ],
)
def test_a_job_with_little_of_its_nodes_memory_is_warned(says, capfd, config, given, gives):
    says("scontrol", config, f"   TRES=cpu=8,{given},node=2\n", NODE)
    slurm.warn_if_memory_is_limited(JOB)
    warning = f"warning: Slurm gives this job {gives} MB of the 8,000 that node1 has; use sbatch --mem=0 for all of it\n"
    assert capfd.readouterr().out == (warning if gives else "")
