"""1.train.sbatch on a real Slurm, with a training program that only counts its steps."""

import json
import os
import re
import shutil

import pytest

from tests.support.projects import starts

pytestmark = pytest.mark.slow


def log(project, job):
    return (project / f"logs/mamba-train_{job}.out").read_text()


def wait_for_step(cluster, project, run="runs/a"):
    cluster.wait_until(
        lambda: '"running"' in read(project / run / "status.json"), "the training has begun"
    )


def read(path):
    return path.read_text() if path.exists() else ""


def without_label(line):
    return re.sub(r"^\d+: ", "", line)


def test_two_nodes_make_one_run_of_two_ranks_in_the_shared_venv(start_cluster, slurm_project):
    cluster = start_cluster()
    job = cluster.submit(
        slurm_project, "--save_ckpt_path=runs/a", "--num_steps=3", "--tracker=none"
    )
    assert cluster.wait_for_end(job) == "COMPLETED", log(slurm_project, job)
    ranks = starts(slurm_project / "runs/a")
    assert sorted(rank["rank"] for rank in ranks) == [0, 1]
    for rank in ranks:
        environment = rank["environment"]
        assert rank["words"] == ["--save_ckpt_path=runs/a", "--num_steps=3", "--tracker=none"], (
            "settings go through as they are"
        )
        assert rank["cwd"] == str(slurm_project)
        assert (environment["WORLD_SIZE"], environment["LOCAL_WORLD_SIZE"]) == ("2", "1")
        assert environment["MASTER_ADDR"] == "node1", (
            "ranks meet at a host name, which a replaced node keeps"
        )
        on_node = environment["KERNELS_ON_NODE"]
        assert on_node.startswith("/tmp/mamba-train-"), (
            "compiler caches are the node's and the job's own"
        )
        assert environment["TRITON_CACHE_DIR"] == f"{on_node}/triton"
        assert environment["TORCHINDUCTOR_CACHE_DIR"] == f"{on_node}/inductor"
        assert environment["TRITON_DUMP_DIR"].startswith("/tmp/mamba-train-")
        parts = [word.split("=")[0] for word in environment["START_PARTS"].split("+")]
        assert [part for part in parts if part != "corpus"] == [
            "queue",
            "allocation",
            "settings",
            "nodes",
            "since",
        ], "the corpus is made in less than a second, or told"
        assert float(environment["RANKS_BEGAN"]) > float(
            environment["START_PARTS"].rpartition("=")[2]
        )
        assert environment["GLOO_SOCKET_IFNAME"] == "eth0", (
            "a node's own name is 127.0.1.1 to itself"
        )
        assert not any(name.startswith("FI_") for name in environment), (
            "no EFA settings without EFA devices"
        )
    text = log(slurm_project, job)
    assert "0: fake rank" in text and "1: fake rank" in text, "each node's lines have its prefix"
    assert "finished" in text.splitlines()[-1]


def test_gpus_are_counted_on_the_nodes(start_cluster, slurm_project):
    """Nothing in the command says that these nodes have four GPUs each."""
    cluster = start_cluster(gpus=4)
    bin_folder = slurm_project / "bin"
    bin_folder.mkdir()
    (bin_folder / "nvidia-smi").write_text(
        "#!/bin/sh\nfor i in 1 2 3 4; do echo 'NVIDIA Fake 4GB'; done\n"
    )
    (bin_folder / "nvidia-smi").chmod(0o755)
    job = cluster.submit(
        slurm_project, "--save_ckpt_path=runs/a", "--num_steps=2", env=path_first(bin_folder)
    )
    assert cluster.wait_for_end(job) == "COMPLETED", log(slurm_project, job)
    ranks = starts(slurm_project / "runs/a")
    assert sorted(rank["rank"] for rank in ranks) == list(range(8))
    assert sorted({rank["environment"]["LOCAL_RANK"] for rank in ranks}) == ["0", "1", "2", "3"]
    assert "node2: 4 GPUs NVIDIA Fake 4GB" in log(slurm_project, job)


def test_a_broken_gpu_ends_the_job_with_the_name_of_its_node(start_cluster, slurm_project):
    cluster = start_cluster(gpus=4)
    bin_folder = slurm_project / "bin"
    bin_folder.mkdir()
    (bin_folder / "nvidia-smi").write_text(
        "#!/bin/sh\nfor i in 1 2 3 4; do\n    echo 'NVIDIA Fake 4GB'\n"
        "    [ $(hostname) != node2 ] || break\ndone\n"
    )
    (bin_folder / "nvidia-smi").chmod(0o755)
    job = cluster.submit(
        slurm_project,
        "--save_ckpt_path=runs/a",
        env={**path_first(bin_folder), "MAX_RESTARTS": "0"},
    )
    assert cluster.wait_for_end(job) == "FAILED"
    text = log(slurm_project, job)
    assert (
        "error: node2: Slurm assigned 4 GPUs, but the driver shows 1" in text
        and "nodename=node2 state=drain" in text
    )
    assert not starts(slurm_project / "runs/a"), "training must not begin"


def test_nodes_with_different_gpus_are_refused(start_cluster, slurm_project):
    cluster = start_cluster(gpus=[4, 2])
    job = cluster.submit(slurm_project, "--save_ckpt_path=runs/a")
    assert cluster.wait_for_end(job) == "FAILED" and cluster.restarts(job) == 0
    assert "different GPUs (node1 gpu:4, node2 gpu:2)" in log(slurm_project, job)


def path_first(folder):
    return {"PATH": f"{folder}:{os.environ['PATH']}"}


def test_usr1_leads_to_a_committed_checkpoint_and_a_requeue_that_finishes(
    start_cluster, slurm_project
):
    """What `--signal=B:USR1@300` does before the time limit, brought forward by hand."""
    cluster = start_cluster()
    job = cluster.submit(
        slurm_project, "--save_ckpt_path=runs/a", "--num_steps=20", env={"FAKE": "held"}
    )
    wait_for_step(cluster, slurm_project)
    cluster.run("scancel", "--batch", "--signal=USR1", job)
    assert cluster.wait_for_end(job) == "COMPLETED", log(slurm_project, job)
    assert cluster.restarts(job) == 1
    steps = [start["step"] for start in starts(slurm_project / "runs/a") if start["rank"] == 0]
    assert len(steps) == 2 and 0 < steps[1] < 20, (
        "the second start goes on from the checkpoint of the first"
    )
    assert json.loads((slurm_project / "runs/a/status.json").read_text()) == {
        "status": "finished",
        "step": 20,
        "reason": "",
    }
    assert not (slurm_project / "runs/a/STOP").exists()
    assert not list((slurm_project / "logs").glob("restarts_*")), (
        "nothing is left of a run that is finished"
    )


def test_a_stop_before_training_has_begun_is_not_lost(start_cluster, slurm_project):
    """The request comes while nodes are being checked; the job must be queued again, not train into the time limit."""
    cluster = start_cluster()
    script, before = (
        slurm_project / "1.train.sbatch",
        '    await timeout "$PREFLIGHT_SECONDS" "${srun[@]}"',
    )
    assert script.read_text().count(before) == 1
    script.write_text(
        script.read_text().replace(
            before, f"    [ ${{attempt#*.}} != 0 ] || kill -USR1 $$\n{before}"
        )
    )
    job = cluster.submit(slurm_project, "--save_ckpt_path=runs/a", "--num_steps=3")
    assert cluster.wait_for_end(job) == "COMPLETED", log(slurm_project, job)
    assert cluster.restarts(job) == 1


def test_scontrol_requeue_goes_on_from_a_checkpoint(start_cluster, slurm_project):
    cluster = start_cluster(extra_config="KillWait=90")
    job = cluster.submit(
        slurm_project,
        "--save_ckpt_path=runs/a",
        "--num_steps=20",
        env={"FAKE": "held", "FAKE_COMMIT_SECONDS": "3"},
    )
    wait_for_step(cluster, slurm_project)
    cluster.run("scontrol", "requeue", job)
    assert cluster.wait_for_end(job) == "COMPLETED", log(slurm_project, job)
    assert cluster.restarts(job) == 1
    steps = [start["step"] for start in starts(slurm_project / "runs/a") if start["rank"] == 0]
    assert len(steps) == 2 and steps[1] > 0, "SIGTERM commits a checkpoint too"


def test_each_task_of_an_array_is_a_run_of_its_own_and_is_queued_again_alone(
    start_cluster, slurm_project
):
    """One of them has the number of the whole array, as which Slurm would requeue, and tell of, all."""
    cluster = start_cluster()
    (slurm_project / "data/builtin/index.json").touch()  # else both make it
    (slurm_project / "sweep.sbatch").write_text(
        "#!/bin/bash\n#SBATCH --exclusive --requeue --output=logs/%j.out\n"
        "[ $SLURM_ARRAY_TASK_ID = 1 ] || export FAKE=held\n"
        "exec ./1.train.sbatch --save_ckpt_path=runs/$SLURM_ARRAY_TASK_ID "
        "--num_steps=20\n"
    )
    array = cluster.run(
        "sbatch", "--parsable", "--array=1,2", "sweep.sbatch", cwd=slurm_project
    ).strip()
    wait_for_step(cluster, slurm_project, "runs/2")
    cluster.run("scancel", "--batch", "--signal=USR1", f"{array}_2")
    assert [cluster.wait_for_end(f"{array}_{number}") for number in (1, 2)] == [
        "COMPLETED",
        "COMPLETED",
    ]
    assert [cluster.restarts(f"{array}_{number}") for number in (1, 2)] == [0, 1]
    steps = [
        [start["step"] > 0 for start in starts(slurm_project / f"runs/{number}")]
        for number in (1, 2)
    ]
    assert steps == [[False], [False, True]]


def test_scancel_ends_the_job_for_good_but_with_a_checkpoint(start_cluster, slurm_project):
    cluster = start_cluster(extra_config="KillWait=90")
    job = cluster.submit(
        slurm_project,
        "--save_ckpt_path=runs/a",
        "--num_steps=1000",
        env={"FAKE_COMMIT_SECONDS": "3"},
    )
    wait_for_step(cluster, slurm_project)
    cluster.run("scancel", job)
    assert cluster.wait_for_end(job) == "CANCELLED"
    cluster.wait_until(lambda: cluster.idle_nodes() == 2, "the job has left its nodes")
    assert cluster.state(job) == "CANCELLED" and cluster.restarts(job) == 0, (
        "a job that was cancelled must not come back"
    )
    assert list((slurm_project / "runs/a/checkpoints").glob("step_*/COMMIT"))


def test_after_scancel_the_checkpoint_may_take_as_long_as_kill_wait(start_cluster, slurm_project):
    """Longer than the 30 s after which torchrun by itself kills its ranks."""
    cluster = start_cluster(extra_config="KillWait=90")
    job = cluster.submit(
        slurm_project,
        "--save_ckpt_path=runs/a",
        "--num_steps=1000",
        env={"FAKE_COMMIT_SECONDS": "35"},
    )
    wait_for_step(cluster, slurm_project)
    cluster.run("scancel", job)
    cluster.wait_until(lambda: cluster.state(job) == "CANCELLED", "the job has left its nodes")
    assert '"stopped"' in read(slurm_project / "runs/a/status.json"), log(slurm_project, job)
    assert list((slurm_project / "runs/a/checkpoints").glob("step_*/COMMIT"))


def test_a_stop_file_ends_the_job_without_a_requeue(start_cluster, slurm_project):
    cluster = start_cluster()
    job = cluster.submit(slurm_project, "--save_ckpt_path=runs/a", "--num_steps=1000")
    wait_for_step(cluster, slurm_project)
    (slurm_project / "runs/a/STOP").touch()
    assert cluster.wait_for_end(job) == "COMPLETED"
    assert cluster.restarts(job) == 0
    assert "as the file STOP asked" in log(slurm_project, job)


def test_preemption_with_a_grace_time_goes_on_later(start_cluster, slurm_project):
    """A more important job takes the nodes; ours commits, gives way, and finishes after it."""
    cluster = start_cluster(
        extra_config="PreemptType=preempt/partition_prio\nPreemptMode=REQUEUE\n"
        "PartitionName=urgent Nodes=ALL PriorityTier=10 State=UP\n"
        "PartitionName=spare Nodes=ALL PriorityTier=1 GraceTime=200 PreemptMode=REQUEUE State=UP"
    )
    job = cluster.submit(
        slurm_project,
        "--save_ckpt_path=runs/a",
        "--num_steps=20",
        options=["--partition=spare"],
        env={"FAKE": "held"},
    )
    wait_for_step(cluster, slurm_project)
    cluster.run(
        "sbatch",
        "--output=/dev/null",
        "--partition=urgent",
        "--nodes=2",
        "--exclusive",
        "--wrap=sleep 3",
    )
    assert cluster.wait_for_end(job) == "COMPLETED", log(slurm_project, job)
    assert cluster.restarts(job) >= 1
    steps = [start["step"] for start in starts(slurm_project / "runs/a") if start["rank"] == 0]
    assert len(steps) == 2 and steps[1] > 0


def test_a_node_that_dies_does_not_end_the_job(start_cluster, slurm_project):
    """A spare node takes its place; without one the job is queued again. Each time the run resumes from the newest
    committed checkpoint, on as many nodes. Without the first, where the script runs, the others queue it again."""
    cluster, run = start_cluster(nodes=3), slurm_project / "runs/a"
    script = slurm_project / "mamba_fsdp/launch/spares.sh"
    script.write_text(script.read_text().replace("WATCH_SECONDS=20", "WATCH_SECONDS=1"))
    job = cluster.submit(
        slurm_project,
        "--save_ckpt_path=runs/a",
        "--num_steps=100000",
        "--spares=1",
        options=["--nodes=3"],
    )
    cluster.wait_until(
        (run / "checkpoints/step_00000005/COMMIT").exists, "a checkpoint is committed"
    )
    cluster.kill_node("node2")
    cluster.wait_until(lambda: len(starts(run)) == 4, "the run has resumed on the spare node")
    assert cluster.state(job) == "RUNNING" and cluster.restarts(job) == 0
    assert "lost       node2\nresuming from step_00000005 on node1 node3\n" in log(
        slurm_project, job
    )
    assert (
        "node2 failed first.\nIt does not answer any longer."
        in next(run.glob("failures/*/0-*.txt")).read_text()
    )
    cluster.kill_node("node3")
    cluster.wait_until(lambda: cluster.state(job) == "PENDING", "the job is queued again")
    for name in ("node2", "node3"):
        cluster.start_node(name)
    cluster.wait_until(lambda: cluster.idle_nodes() == 3, "the nodes are back")
    cluster.release(job)
    cluster.wait_until(lambda: len(starts(run)) == 6, "two nodes train again")
    assert [start["step"] for start in starts(run)] == [0, 0, 5, 5, 5, 5]
    cluster.wait_until(
        lambda: " sh " in cluster.run("squeue", "--steps"), "a node watches the first"
    )
    cluster.kill_node("node1")
    cluster.wait_until(lambda: cluster.state(job) == "PENDING", "the job is queued again")


@pytest.mark.parametrize("words", [["--num_stepss=3"], ["--seq_length=many"], ["three"]])
def test_a_bad_setting_fails_at_once_and_is_never_queued_again(start_cluster, slurm_project, words):
    cluster = start_cluster()
    job = cluster.submit(slurm_project, "--save_ckpt_path=runs/a", *words)
    assert cluster.wait_for_end(job) == "FAILED"
    assert cluster.restarts(job) == 0
    assert words[0].strip("-").split("=")[0] in log(slurm_project, job)
    assert not starts(slurm_project / "runs/a")


def test_a_mistake_that_only_training_can_find_is_never_queued_again(start_cluster, slurm_project):
    cluster = start_cluster()
    job = cluster.submit(slurm_project, "--save_ckpt_path=runs/a", env={"FAKE": "mistake"})
    assert cluster.wait_for_end(job) == "FAILED"
    assert cluster.restarts(job) == 0
    assert re.search(
        r"not queued again.*\n.*failed first\.\nerror: the cause on rank", log(slurm_project, job)
    )


@pytest.mark.parametrize(
    "fake, last_line",
    [("crash", "Traceback: the cause"), ("storage", "error: the cause on rank 1")],
)
def test_a_job_that_fails_without_a_new_checkpoint_gives_up_after_max_restarts(
    start_cluster, slurm_project, fake, last_line
):
    """Also where it is the storage that fails: it may be well by the next start."""
    cluster = start_cluster()
    job = cluster.submit(
        slurm_project, "--save_ckpt_path=runs/a", env={"FAKE": fake, "MAX_RESTARTS": "1"}
    )
    assert cluster.wait_for_end(job) == "FAILED"
    assert cluster.restarts(job) == 1
    text = log(slurm_project, job)
    assert "gave up after 1 restarts without a checkpoint newer than start (MAX_RESTARTS=1)" in text
    last = [without_label(line) for line in text.strip().splitlines()][-2:]
    assert last == ["rank 1 on node2 failed first.", last_line], (
        "the log ends with the error of the rank that failed first"
    )


def test_restarts_with_new_checkpoints_are_not_counted(start_cluster, slurm_project):
    cluster = start_cluster()
    job = cluster.submit(
        slurm_project, "--save_ckpt_path=runs/a", "--num_steps=100000", env={"MAX_RESTARTS": "0"}
    )
    for _ in range(2):
        begun = len(starts(slurm_project / "runs/a"))
        cluster.wait_until(
            lambda begun=begun: len(starts(slurm_project / "runs/a")) >= begun + 2,
            "the training has begun",
        )
        wait_for_step(cluster, slurm_project)
        cluster.run("scancel", "--batch", "--signal=USR1", job)
        cluster.wait_until(lambda: cluster.state(job) == "PENDING", "the job is queued again")
        cluster.release(job)
    cluster.run("scancel", job)
    assert "given up" not in log(slurm_project, job)


def test_without_image_and_venv_the_job_says_what_to_make(start_cluster, slurm_project):
    cluster = start_cluster()
    shutil.rmtree(slurm_project / ".venv")
    job = cluster.submit(slurm_project, "--save_ckpt_path=runs/a")
    assert cluster.wait_for_end(job) == "FAILED" and cluster.restarts(job) == 0
    text = log(slurm_project, job)
    assert (
        f"neither an image ({slurm_project}/mamba-train.sqsh) nor an environment ({slurm_project}/.venv)"
        in text
    )
    assert "./0.create_env.sh" in text


def test_an_image_that_is_named_must_be_there(start_cluster, slurm_project):
    """No silent way out into .venv."""
    cluster = start_cluster()
    job = cluster.submit(
        slurm_project, "--save_ckpt_path=runs/a", env={"IMAGE": "/nowhere/mamba.sqsh"}
    )
    assert cluster.wait_for_end(job) == "FAILED" and cluster.restarts(job) == 0
    assert "IMAGE=/nowhere/mamba.sqsh: there is no such file" in log(slurm_project, job)


def test_a_half_made_venv_is_not_used(start_cluster, slurm_project):
    cluster = start_cluster()
    (slurm_project / ".venv/.complete").unlink()
    job = cluster.submit(slurm_project, "--save_ckpt_path=runs/a")
    assert cluster.wait_for_end(job) == "FAILED" and cluster.restarts(job) == 0
    assert "is incomplete; make it again: ./0.create_env.sh" in log(slurm_project, job)


def test_a_run_folder_that_is_not_shared_is_found_before_training(start_cluster, slurm_project):
    """/tmp is each node's own."""
    cluster = start_cluster()
    job = cluster.submit(
        slurm_project, "--save_ckpt_path=/tmp/private-run", env={"MAX_RESTARTS": "0"}
    )
    assert cluster.wait_for_end(job) == "FAILED"
    text = log(slurm_project, job)
    assert (
        "error: node2: /tmp/private-run/preflight is not the folder that the first node sees"
        in text
    )
    assert "rank" not in text


def test_submitting_from_elsewhere_finds_the_project(start_cluster, slurm_project, tmp_path):
    cluster = start_cluster()
    (tmp_path / "elsewhere/logs").mkdir(parents=True)
    job = cluster.run(
        "sbatch",
        "--parsable",
        slurm_project / "1.train.sbatch",
        "--save_ckpt_path=runs/a",
        "--num_steps=2",
        cwd=tmp_path / "elsewhere",
    ).strip()
    assert cluster.wait_for_end(job) == "COMPLETED", log(tmp_path / "elsewhere", job)
    assert starts(slurm_project / "runs/a")[0]["cwd"] == str(slurm_project)


def test_a_training_that_does_not_stop_in_time_is_queued_again_before_the_limit(
    start_cluster, slurm_project
):
    """A job that runs into its limit is over for Slurm; resuming from an older checkpoint is better."""
    cluster = start_cluster()
    script = slurm_project / "1.train.sbatch"
    assert "\nLAST_SECONDS=45 " in script.read_text()
    # no test waits for a limit
    script.write_text(script.read_text().replace("\nLAST_SECONDS=45 ", "\nLAST_SECONDS=86400 "))
    job = cluster.submit(
        slurm_project,
        "--save_ckpt_path=runs/a",
        "--num_steps=2",
        options=["--time=60"],
        env={"FAKE": "deaf"},
    )
    wait_for_step(cluster, slurm_project)
    cluster.run("scancel", "--batch", "--signal=USR1", job)
    cluster.wait_until(lambda: cluster.restarts(job) == 1, "the job is queued again")
    assert "no checkpoint was committed before the time limit" in log(slurm_project, job)
