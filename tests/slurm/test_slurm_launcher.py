"""1.train.sbatch on a real Slurm, with a training program that only counts its steps."""

import os
import re
import shutil
import subprocess

import pytest

from tests.support import projects
from tests.support.processes import write_program
from tests.support.projects import FOR_EVER, starts

pytestmark = [pytest.mark.pinned, pytest.mark.slow]
RUN = "--save_ckpt_path=runs/a"


@pytest.fixture
def project(slurm_project):
    """The project, whose jobs these tests submit; runs/a is their run folder."""
    return slurm_project


def log(project, job):
    return (project / f"logs/mamba-train_{job}.out").read_text()


def read(path):
    return path.read_text() if path.exists() else ""


def end_of(cluster, project, *words, **env):
    """(state, restarts, log) of a job at its end."""
    job = cluster.submit(project, RUN, *words, env=env)
    state = cluster.wait_for_end(job)
    return state, cluster.restarts(job), log(project, job)


def wait_for_training(cluster, project, run="runs/a"):
    status = project / run / "status.json"
    cluster.wait_until(lambda: '"running"' in read(status), "the training has begun")


def steps_of_starts(project, run="runs/a"):
    """The steps from which rank 0 began."""
    return [start["step"] for start in starts(project / run) if start["rank"] == 0]


def has_checkpoint(project):
    return bool(list(project.glob("runs/a/checkpoints/step_*/COMMIT")))


def test_two_nodes_make_one_run_of_a_rank_for_each_gpu_in_the_shared_venv(
    start_cluster, project, tmp_path
):
    """Submitted from elsewhere. Nothing in the command says that these nodes have two GPUs each."""
    smi = "#!/bin/sh\nfor i in 1 2; do echo 'NVIDIA Fake 4GB'; done\n"
    write_program(project / "bin/nvidia-smi", smi)
    environment = {"PATH": f"{project}/bin:{os.environ['PATH']}"}
    cluster = start_cluster(gpus=2)
    (tmp_path / "elsewhere/logs").mkdir(parents=True)
    words = [RUN, "--num_steps=3", "--tracker=none"]
    command = ["sbatch", "--parsable", project / "1.train.sbatch", *words]
    job = cluster.run(*command, cwd=tmp_path / "elsewhere", env=environment).strip()
    state, text = cluster.wait_for_end(job), log(tmp_path / "elsewhere", job)
    assert state == "COMPLETED" and "node2: 2 GPUs NVIDIA Fake 4GB" in text, text
    ranks = starts(project / "runs/a")
    assert sorted(rank["rank"] for rank in ranks) == [0, 1, 2, 3]
    for rank in ranks:
        environment = rank["environment"]
        assert rank["settings"] == {"save_ckpt_path": "runs/a", "num_steps": "3", "tracker": []}
        assert rank["cwd"] == str(project)
        assert (environment["WORLD_SIZE"], environment["LOCAL_WORLD_SIZE"]) == ("4", "2")
        assert environment["MASTER_ADDR"] == "node1", "a host name, which a replaced node keeps"
        assert environment["TRITON_CACHE_DIR"] == f"{project}/runs/.cache/triton"
        assert environment["GLOO_SOCKET_IFNAME"] == "eth0", "its own name is 127.0.1.1 to a node"
        assert not any(name.startswith("FI_") for name in environment), "there is no EFA"
    assert "0: fake rank 0" in text and "1: fake rank 2" in text, (
        "each node's lines have its prefix"
    )
    assert text.splitlines()[-1] == f"finished: {project}/runs/a"
    assert not list((project / "logs").glob("restarts_*"))
    assert not (project / "runs/a/starts").exists()


def test_nodes_with_different_gpus_are_refused(start_cluster, project):
    state, restarts, text = end_of(start_cluster(gpus=[4, 2]), project)
    assert (state, restarts) == ("FAILED", 0)
    assert "different GPUs (node1 gpu:4, node2 gpu:2)" in text


def test_a_stop_before_training_has_begun_is_not_lost(start_cluster, project):
    """It comes while nodes are being checked: the job is queued again, and does not train into the limit."""
    script = project / "mamba_fsdp/launch/slurm_training.py"
    before = "        self.supervisor.run(self.on_all_nodes(report, limited=True))\n"
    asks = f"        self.job.restart or os.kill(os.getpid(), signal.SIGUSR1)\n{before}"
    projects.edit(script, before, asks)
    state, restarts, text = end_of(start_cluster(), project, "--num_steps=3")
    assert (state, restarts) == ("COMPLETED", 1), text


def test_each_task_of_an_array_is_a_run_of_its_own_and_is_queued_again_alone(
    start_cluster, project
):
    """One of them has the number of the whole array, as which Slurm would requeue, and tell of, all."""
    cluster = start_cluster()
    (project / "data/builtin/index.json").touch()  # else both make it
    (project / "sweep.sbatch").write_text(
        "#!/bin/bash\n#SBATCH --exclusive --requeue --output=logs/%j.out\n"
        "[ $SLURM_ARRAY_TASK_ID = 1 ] || export FAKE=held\n"
        "exec ./1.train.sbatch --save_ckpt_path=runs/$SLURM_ARRAY_TASK_ID --num_steps=20\n"
    )
    array = cluster.run("sbatch", "--parsable", "--array=1,2", "sweep.sbatch", cwd=project).strip()
    tasks = [f"{array}_1", f"{array}_2"]
    wait_for_training(cluster, project, "runs/2")
    cluster.run("scancel", "--batch", "--signal=USR1", tasks[1])
    assert [cluster.wait_for_end(task) for task in tasks] == ["COMPLETED", "COMPLETED"]
    assert [cluster.restarts(task) for task in tasks] == [0, 1]
    assert (
        steps_of_starts(project, "runs/1") == [0] and len(steps_of_starts(project, "runs/2")) == 2
    )


def test_scancel_ends_the_job_for_good_but_with_a_checkpoint(start_cluster, project):
    """It may take as long as KillWait, which is long here, however slow the machine is."""
    cluster = start_cluster(extra_config="KillWait=400")
    environment = {"FAKE_COMMIT_SECONDS": "3"}
    job = cluster.submit(project, RUN, FOR_EVER, env=environment)
    wait_for_training(cluster, project)
    cluster.run("scancel", job)
    assert cluster.wait_for_end(job) == "CANCELLED"
    cluster.wait_until(lambda: cluster.idle_nodes() == 2, "the job has left its nodes")
    assert cluster.state(job) == "CANCELLED" and cluster.restarts(job) == 0
    assert has_checkpoint(project) and '"stopped"' in read(project / "runs/a/status.json")


def test_a_stop_file_ends_the_job_without_a_requeue(start_cluster, project):
    cluster = start_cluster()
    job = cluster.submit(project, RUN, FOR_EVER)
    wait_for_training(cluster, project)
    (project / "runs/a/STOP").touch()
    assert cluster.wait_for_end(job) == "COMPLETED" and cluster.restarts(job) == 0
    assert "as the file STOP asked" in log(project, job)


def test_preemption_with_a_grace_time_goes_on_later(start_cluster, project):
    """A more important job takes the nodes; ours commits, gives way, and finishes after it."""
    cluster = start_cluster(
        extra_config="PreemptType=preempt/partition_prio\nPreemptMode=REQUEUE\n"
        "PartitionName=urgent Nodes=ALL PriorityTier=10 State=UP\n"
        "PartitionName=low Nodes=ALL PriorityTier=1 GraceTime=400 PreemptMode=REQUEUE State=UP"
    )
    words = [RUN, "--num_steps=20"]
    job = cluster.submit(project, *words, options=["--partition=low"], env={"FAKE": "held"})
    wait_for_training(cluster, project)
    urgent = ["--partition=urgent", "--nodes=2", "--exclusive", "--wrap=sleep 3"]
    cluster.run("sbatch", "--output=/dev/null", *urgent)
    assert cluster.wait_for_end(job) == "COMPLETED", log(project, job)
    first, second = steps_of_starts(project)
    assert cluster.restarts(job) >= 1 and second > 0


def test_a_job_that_has_lost_its_first_node_is_queued_again(start_cluster, project):
    """By Slurm: the script runs there."""
    cluster, run = start_cluster(), project / "runs/a"
    job = cluster.submit(project, RUN, FOR_EVER)
    checkpoint = run / "checkpoints/step_00000005/COMMIT"
    cluster.wait_until(checkpoint.exists, "a checkpoint is committed")
    cluster.kill_node("node1")
    cluster.wait_until(lambda: cluster.state(job) == "PENDING", "the job is queued again")
    cluster.start_node("node1")
    cluster.wait_until(lambda: cluster.idle_nodes() == 2, "the node is back")
    cluster.release(job)
    cluster.wait_until(lambda: len(steps_of_starts(project)) == 2, "two nodes train again")
    first, second = steps_of_starts(project)
    assert first == 0 and second >= 5, "what Slurm asks to end commits a checkpoint if it can"


def test_a_node_that_went_is_named_and_no_survivor_blamed(start_cluster, project):
    """The ranks on other nodes fail for its sake, long before Slurm knows. For as long as KillWait srun waits for the
    lost node, and the script for srun."""
    cluster, run = start_cluster(extra_config="KillWait=400"), project / "runs/a"
    job = cluster.submit(project, RUN, FOR_EVER, env={"MAX_RESTARTS": "0"})
    checkpoint = run / "checkpoints/step_00000005/COMMIT"
    cluster.wait_until(checkpoint.exists, "a checkpoint is committed")
    cluster.cut_power("node2")
    (run / "fail").touch()
    outcome = run / f"starts/{job}.0/outcome.json"
    cluster.wait_until(lambda: "rank 0 on node1" in read(outcome), "a survivor has failed")
    cluster.tell_slurm_of("node2")
    said = "error: Slurm has lost node2\n"
    cluster.wait_until(lambda: said in log(project, job), "the script names the node")
    assert "failed first" not in log(project, job)


def test_a_finished_job_does_not_wait_for_a_node_whose_step_was_killed(start_cluster, project):
    """Its ranks train on, and srun never hears of their end."""
    cluster = start_cluster()
    script = project / "mamba_fsdp/launch/slurm_training.py"
    projects.edit(script, "\nSECONDS_BEHIND = 60 ", "\nSECONDS_BEHIND = 3 ")
    job = cluster.submit(project, RUN, "--num_steps=50")
    wait_for_training(cluster, project)
    subprocess.run(cluster.command("pkill", "-KILL", "slurmstepd", on="node2"), check=True)
    assert cluster.wait_for_end(job) == "COMPLETED", log(project, job)
    assert "srun: StepId=1.1 task 1: running" in log(project, job), "srun says whom it misses"


def test_ranks_start_again_in_place_after_a_launcher_was_killed(start_cluster, project):
    """It can't say why; the job keeps its nodes and containers. When they do is held in test_decision.py."""
    cluster = start_cluster()
    job = cluster.submit(project, RUN, FOR_EVER)
    checkpoint = project / "runs/a/checkpoints/step_00000005/COMMIT"
    cluster.wait_until(checkpoint.exists, "a checkpoint is committed")
    kill = ["pkill", "-KILL", "-f", "training.py"]  # its rank too, which would end with it
    subprocess.run(cluster.command(*kill, on="node2"), check=True)
    said = "restarts   the ranks after the loss of a launcher, which was killed"
    cluster.wait_until(lambda: said in log(project, job), said)
    cluster.wait_until(lambda: len(steps_of_starts(project)) == 2, "rank 0 has begun again")
    assert cluster.state(job) == "RUNNING" and cluster.restarts(job) == 0


def test_a_time_limit_that_leaves_no_time_is_refused(start_cluster, project):
    """Slurm sends USR1 at once: the job would be queued again for ever."""
    cluster = start_cluster()
    job = cluster.submit(project, RUN, FOR_EVER, options=["--time=5"])
    assert cluster.wait_for_end(job) == "FAILED" and cluster.restarts(job) == 0
    said = log(project, job)
    assert "before the time limit, which leaves no time to train" in said, said
    assert not list((project / "logs").glob("restarts_*"))


def test_jobs_that_cannot_train_are_told_why(start_cluster, project):
    """Of a heterogeneous job each part has nodes of its own. A shell that a user holds open shares its node."""
    cluster = start_cluster()
    parts = ["sbatch", "--parsable", "--nodes=1", ":", "--nodes=1", "1.train.sbatch", RUN]
    job = cluster.run(*parts, cwd=project).split()[-1]
    assert cluster.wait_for_end(job) == "FAILED"
    assert "error: this is a heterogeneous job (sbatch ... : ...)" in log(project, job)
    shell = ["srun", "--exclusive", "--nodes=1", "./1.train.sbatch", RUN, "--num_steps=2"]
    said = cluster.run(*shell, cwd=project)
    assert said.splitlines()[-1] == f"finished: {project}/runs/a"


@pytest.mark.parametrize("option", ["--mem=1000", "--mem-per-cpu=100", "--mem-per-gpu=100"])
def test_memory_may_be_asked_for_in_any_way(start_cluster, project, option):
    cluster = start_cluster(gpus=1)
    cluster.submit(project, RUN, options=["--test-only", "--gpus-per-node=1", option])


def test_two_jobs_of_one_run_that_start_together_do_not_disturb_each_other(start_cluster, project):
    """Each judges its own nodes by their own answers; STOP is for the one that trains."""
    cluster = start_cluster(nodes=4)
    (project / "data/builtin/index.json").touch()  # else both make it
    shared = [cluster.submit(project, RUN, "--num_steps=20") for _ in range(2)]
    assert [cluster.wait_for_end(job) for job in shared] == ["COMPLETED", "COMPLETED"]
    for job in shared:
        said = log(project, job)
        assert "no answer" not in said and "the node is down" not in said, said
    assert not (project / "runs/a/starts").exists()


def test_scancel_while_the_job_makes_its_data_ends_it_at_once(start_cluster, project):
    cluster = start_cluster(extra_config="KillWait=400")
    slow = "import os, time\nopen('begun', 'w').close()\ntime.sleep(600)\n"
    (project / "get_dataset.py").write_text(slow)
    job = cluster.submit(project, RUN)
    cluster.wait_until((project / "begun").exists, "the data is being made")
    cluster.run("scancel", job)
    assert cluster.wait_for_end(job) == "CANCELLED"
    cluster.wait_until(lambda: cluster.idle_nodes() == 2, "the job has left its nodes")
    assert "ended at start by Slurm or by hand" in log(project, job)
    assert not list((project / "logs").glob("restarts_*"))


def test_a_node_that_sees_another_version_of_the_project_is_named(start_cluster, project, tmp_path):
    """Its ranks would train with the other code. The run folder is elsewhere, where both see it."""
    cluster = start_cluster()
    other = tmp_path / "other"
    shutil.copytree(project, other, symlinks=True)
    with open(other / "mamba_fsdp/trainer/muon.py", "a") as muon:
        muon.write("# older\n")
    subprocess.run(cluster.command("mount", "--bind", other, project, on="node2"), check=True)
    shared = f"--save_ckpt_path={tmp_path}/run"
    state, _, text = end_of(cluster, project, shared, MAX_RESTARTS="0")
    assert state == "FAILED" and not starts(tmp_path / "run")
    assert f"error: node2: its {project} holds other code than that of node1; mount" in text, text


def test_what_no_restart_can_fix_fails_and_is_never_queued_again(start_cluster, project):
    """A mistake, whoever finds it; /tmp is each node's own. And what fails again and again."""
    cluster = start_cluster()
    run = project / "runs/a"
    state, restarts, text = end_of(cluster, project, "--num_stepss=3")
    assert (state, restarts) == ("FAILED", 0) and "did you mean num_steps" in text, text
    elsewhere = "--save_ckpt_path=/tmp/own"
    state, restarts, text = end_of(cluster, project, elsewhere, MAX_RESTARTS="0")
    assert (state, restarts) == ("FAILED", 0), text
    assert "is not the folder that the first node sees" in text
    assert not starts(run)
    state, restarts, text = end_of(cluster, project, FOR_EVER, FAKE="mistake")
    assert (state, restarts) == ("FAILED", 0) and "not queued again, since no restart" in text, text
    (run / "starts.jsonl").unlink()
    fails = {"FAKE": "storage", "MAX_RESTARTS": "0"}
    state, restarts, text = end_of(cluster, project, FOR_EVER, **fails)
    assert (state, restarts) == ("FAILED", 0), text
    assert "gave up after 0 restarts without a checkpoint newer than start (MAX_RESTARTS=0)" in text
    lines = [re.sub(r"^\d+: ", "", line) for line in text.strip().splitlines()]
    assert lines[-2:] == ["rank 1 on node2 failed first.", "error: the cause on rank 1"]


def test_a_training_that_does_not_stop_in_time_is_queued_again_before_the_limit(
    start_cluster, project
):
    """A job that runs into its limit is over for Slurm; resuming from an older checkpoint is better."""
    cluster = start_cluster()
    script = project / "mamba_fsdp/launch/slurm_training.py"  # no test waits for a limit
    projects.edit(script, "\nLAST_SECONDS = 45 ", "\nLAST_SECONDS = 86400 ")
    words = [RUN, "--num_steps=2"]
    job = cluster.submit(project, *words, options=["--time=60"], env={"FAKE": "deaf"})
    wait_for_training(cluster, project)
    cluster.run("scancel", "--batch", "--signal=USR1", job)
    cluster.wait_until(lambda: cluster.restarts(job) == 1, "the job is queued again")
    assert "s before the time limit: the training has not ended" in log(project, job)
