"""Tests 1.train.sbatch on a real Slurm, with a training program that only counts its steps."""

import os

import pytest

from tests.support.processes import write_program
from tests.support.projects import MANY_STEPS, starts

pytestmark = [pytest.mark.pinned, pytest.mark.slow]
RUN = "--save_ckpt_path=runs/a"


@pytest.fixture
def project(slurm_project):
    """Returns the folder of the project from which these tests submit jobs. The run folder of the jobs is runs/a."""
    return slurm_project


def log(project, job):
    return (project / f"logs/mamba-train_{job}.out").read_text()


def read(path):
    return path.read_text() if path.exists() else ""


def wait_for_training(cluster, project):
    status = project / "runs/a/status.json"
    cluster.wait_until(lambda: '"running"' in read(status), "the training has begun")


def wait_for_checkpoint(cluster, project):
    checkpoint = project / "runs/a/checkpoints/step_00000005/COMMIT"
    cluster.wait_until(checkpoint.exists, "a checkpoint is committed")


def steps_of_starts(project):
    """Returns the steps at which rank 0 started."""
    return [start["step"] for start in starts(project / "runs/a") if start["rank"] == 0]


def test_two_nodes_make_one_run_of_a_rank_for_each_gpu_in_the_shared_venv(
    cluster, project, tmp_path
):
    """A job on two nodes with two GPUs each has four ranks, which use the .venv on the shared file system. The job is
    submitted from another folder, and its command does not contain the number of GPUs."""
    smi = "#!/bin/sh\nfor i in 1 2; do echo 'NVIDIA Fake 4GB'; done\n"
    write_program(project / "bin/nvidia-smi", smi)
    environment = {"PATH": f"{project}/bin:{os.environ['PATH']}"}
    (tmp_path / "elsewhere/logs").mkdir(parents=True)
    words = [RUN, "--num_steps=3", "--tracker=none"]
    where = ["--partition=gpus", "--nodelist=node[4-5]"]
    command = ["sbatch", "--parsable", *where, project / "1.train.sbatch", *words]
    job = cluster.run(*command, cwd=tmp_path / "elsewhere", env=environment).strip()
    state = cluster.wait_for_end(job)
    text = log(tmp_path / "elsewhere", job)
    assert state == "COMPLETED" and "node5: 2 GPUs NVIDIA Fake 4GB" in text, text
    ranks = starts(project / "runs/a")
    assert sorted(rank["rank"] for rank in ranks) == [0, 1, 2, 3]
    for rank in ranks:
        environment = rank["environment"]
        assert rank["settings"] == {"save_ckpt_path": "runs/a", "num_steps": "3", "tracker": []}
        assert rank["cwd"] == str(project)
        assert len(set(rank["open_files"])) == 1, "many nodes need all that a process may open"
        assert (environment["WORLD_SIZE"], environment["LOCAL_WORLD_SIZE"]) == ("4", "2")
        assert environment["MASTER_ADDR"] == "node4", "a host name is kept if a node is replaced"
        assert environment["TRITON_CACHE_DIR"] == f"{project}/runs/.cache/triton"
        assert environment["GLOO_SOCKET_IFNAME"] == "eth0", "the own name of a node is 127.0.1.1"
        assert not any(name.startswith("FI_") for name in environment), "there is no EFA"
    assert "0: fake rank 0" in text and "1: fake rank 2" in text, "each line names its node"
    assert text.splitlines()[-1] == f"finished: {project}/runs/a"
    assert not (project / "runs/a/starts").exists()


def test_nodes_with_different_gpus_are_told_apart_by_what_slurm_says(cluster, project):
    where = ["--partition=gpus", "--nodelist=node[5-6]"]
    job = cluster.submit(project, RUN, options=where)
    assert cluster.wait_for_end(job) == "FAILED"
    assert "different GPUs (node5 gpu:2, node6 gpu:4)" in log(project, job)


def test_a_job_may_ask_for_memory_in_any_way_and_share_its_node_with_a_users_step(cluster, project):
    for option in ("--mem=1000", "--mem-per-cpu=100", "--mem-per-gpu=100"):
        where = ["--test-only", "--partition=gpus", "--gpus-per-node=1", option]
        cluster.submit(project, RUN, options=where)
    shell = ["srun", "--exclusive", "--nodes=1", "./1.train.sbatch", RUN, "--num_steps=2"]
    output = cluster.run(*shell, cwd=project)
    assert output.splitlines()[-1] == f"finished: {project}/runs/a"


def test_scancel_ends_the_job_with_a_checkpoint(cluster, project):
    job = cluster.submit(project, RUN, MANY_STEPS, env={"FAKE_COMMIT_SECONDS": "3"})
    wait_for_training(cluster, project)
    cluster.run("scancel", job)
    assert cluster.wait_for_end(job) == "CANCELLED"
    cluster.wait_until(lambda: cluster.idle_nodes() == 6, "the job has left its nodes")
    assert cluster.state(job) == "CANCELLED" and cluster.restarts(job) == 0
    assert list(project.glob("runs/a/checkpoints/step_*/COMMIT"))
    assert '"stopped"' in read(project / "runs/a/status.json")


def test_a_preempted_job_with_a_grace_time_continues_later(cluster, project):
    """A job that Slurm preempts for a job of higher priority writes a checkpoint within the grace time, and resumes
    from it later."""
    low = ["--partition=low"]
    job = cluster.submit(project, RUN, "--num_steps=20", options=low, env={"FAKE": "held"})
    wait_for_training(cluster, project)
    urgent = ["--partition=urgent", "--nodes=3", "--exclusive", "--wrap=sleep 3"]
    cluster.run("sbatch", "--output=/dev/null", *urgent)
    assert cluster.wait_for_end(job) == "COMPLETED", log(project, job)
    first, second = steps_of_starts(project)
    assert cluster.restarts(job) >= 1 and second > 0


def test_a_lost_node_is_named_and_other_nodes_are_not_blamed(cluster, project):
    """The log names the lost node, although ranks on other nodes fail because of the loss. Slurm does not notice the
    loss for minutes, so the job queues itself again."""
    run = project / "runs/a"
    job = cluster.submit(project, RUN, MANY_STEPS, env={"MAX_RESTARTS": "0"})
    wait_for_checkpoint(cluster, project)
    cluster.cut_power("node2")
    (run / "fail").touch()
    cluster.wait_until(lambda: "queued again" in log(project, job), "the job gives way")
    text = log(project, job)
    assert "lost       node2: it has not responded" in text and "error: lost node2\n" in text
    assert "failed first" not in text
    cluster.wait_until(lambda: cluster.restarts(job) == 1, "it is queued again")


def test_a_spare_takes_the_place_of_a_node_that_falls_silent(cluster, project):
    """A spare node replaces a node whose network fails, within the same job. Slurm does not notice the loss, and the
    ranks on the other node would wait forever."""
    run = project / "runs/a"
    job = cluster.submit(project, RUN, MANY_STEPS, options=["--nodes=3"], env={"SPARE_NODES": "1"})
    wait_for_checkpoint(cluster, project)
    cluster.set_link("node2", "down")
    cluster.wait_until(lambda: len(starts(run)) == 4, "the ranks have started again")
    nodes = [rank["environment"]["SLURMD_NODENAME"] for rank in starts(run)]
    assert sorted(nodes[:2]) == ["node1", "node2"] and sorted(nodes[2:]) == ["node1", "node3"]
    assert {rank["step"] for rank in starts(run)[2:]} == {5}
    (run / "STOP").touch()
    assert cluster.wait_for_end(job) == "COMPLETED" and cluster.restarts(job) == 0
    assert "nodes      training on node1 node3" in log(project, job)
    assert '"node": "node2", "kind": "lost"' in read(run / "nodes.jsonl")
    assert not (run / "starts").exists()
