"""Tests 1.train.sbatch and 2.tokenize.sbatch in a job, with replacements for Slurm, Pyxis and Enroot.

These tests check the arguments of the replaced commands, and how the job ends. test_decision.py tests the decision
itself, and tests/slurm runs jobs on a real Slurm.
"""

import json
import os
import re
import subprocess
import sys
import textwrap
import time

import pytest

from mamba_fsdp.launch.slurm_training import seconds_for_removal
from tests.support.checkpoints import commit_empty
from tests.support.corpora import write_store
from tests.support.processes import run_program, write_program
from tests.support.pyxis import SQUASHFS, make_cluster

RUN = ["--save_ckpt_path=runs/a", "--use_dummy_dataset=true", "--num_steps=3"]


@pytest.fixture
def cluster(launcher_project, tmp_path):
    """Makes a simulated cluster of two nodes. The project folder has a space in its name."""
    return make_cluster(tmp_path / "cluster", launcher_project)


@pytest.fixture
def image(launcher_project):
    """Makes the default image in the project folder, so that jobs run in it."""
    (launcher_project / "mamba-train.sqsh").write_bytes(SQUASHFS)


def describe_steps(asked, places):
    """Returns the arguments of each step that a job has started with srun, sorted, with `places` replaced by their
    names.

    A step is a list of lines of at most 120 characters.
    """
    lines = []
    for words in asked:
        # The option --container-env is absent on a machine with the NVIDIA driver.
        line = " ".join(word for word in words if not word.startswith("--container-env="))
        for name, place in places.items():
            line = line.replace(str(place), name)
        lines.append(re.sub(r"(node_guard.py \S+ \S+) \d+", r"\1 A_PORT", line))
    return [
        textwrap.wrap(line, 120, break_long_words=False, break_on_hyphens=False)
        for line in sorted(lines)
    ]


# ------------------------------------------------------------------------------------------------ how a job ends

FAILED = {"status": "failed", "code": 1, "lost_rank": "rank 1 on node2", "error": "the error\n"}
KILLED = {}
AGAIN = "queued again, to resume from start"
STOPPED = {"status": "stopped"}
TRAINING = "launch.node"


def ranks(*outcomes, **more):
    """Returns the environment of a job. Its trainings end with these outcomes, one after the other."""
    return {"OUTCOMES": json.dumps(outcomes), **more}


def signalled(signal, at, state="RUNNING", **more):
    """Returns the environment of a job that receives a signal during the command `at`."""
    return {"SIGNAL": signal, "AT": at, "JOB_STATE": state, **more}


def in_seconds(count):
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(time.time() + count))


BY_SLURM = ["ended at start by Slurm or by a user"]
# {event: (environment that causes it, exit code of the job, its last lines)}
ENDS = {
    "all steps are done": (ranks({"status": "finished"}), 0, ["finished: {run}"]),
    "a rank fails once": (ranks(FAILED, {"status": "finished"}), 0, ["finished: {run}"]),
    "a node is lost": (
        ranks(FAILED, LOST="node2"),
        0,
        [AGAIN, "error: lost node2", "waiting    until Slurm has marked node2 as down", "requeued"],
    ),
    "a launcher is killed twice": (
        ranks(KILLED),
        0,
        [AGAIN, "error: a launcher was killed by SIGKILL", "requeued"],
    ),
    "a node is not fit": ({"PREFLIGHT": "1"}, 0, [AGAIN, "requeued"]),
    "a mistake that preflight finds": ({"PREFLIGHT": "2"}, 2, ["not queued again"]),
    "USR1 in preflight": (signalled("USR1", "report"), 0, [AGAIN, "requeued"]),
    "TERM in preflight": (signalled("TERM", "judge", "COMPLETING"), 143, BY_SLURM),
    "USR1 in training": (signalled("USR1", TRAINING, **ranks(STOPPED)), 0, [AGAIN, "requeued"]),
    "USR1 decades before the limit": (
        signalled("USR1", TRAINING, END_TIME=in_seconds(68.5 * 365.25 * 86400), **ranks(STOPPED)),
        0,
        [AGAIN, "requeued"],
    ),
    "TERM in training": (signalled("TERM", TRAINING, "PENDING", **ranks(STOPPED)), 143, BY_SLURM),
}


@pytest.mark.parametrize("happens", ENDS)
def test_how_a_job_ends(cluster, image, launcher_project, happens):
    """A job ends with the exit code and the lines of ENDS, and removes the files of its start from the run folder. The
    restart count is kept only if the job is queued again."""
    how, code, last = ENDS[happens]
    (launcher_project / "logs/restarts_12").touch()  # another job was killed
    done, _, _ = cluster.submit(*RUN, **{"PREFLIGHT": "0", **how})
    assert done.returncode == code, done.stdout
    lines = done.stdout.splitlines()[-len(last) :]
    run = launcher_project / "runs/a"
    for line, start in zip(lines, last, strict=True):
        assert line.startswith(start.format(run=run)), done.stdout
    assert ("restarts   the ranks after the loss of" in done.stdout) == (
        len(cluster.trainings()) > 1
    )
    assert not (run / "starts").exists()
    counts = [path.name for path in (launcher_project / "logs").iterdir()]
    assert counts == (["restarts_77"] if "requeued" in last else [])


def test_a_training_that_does_not_stop_in_time_is_queued_again_before_the_limit(cluster, image):
    """A job whose training does not stop in time is queued again before the time limit. Slurm would not restart a job
    that reaches its limit, so it is better to resume from an older checkpoint."""
    late = signalled("USR1", TRAINING, OUTCOMES="[]", END_TIME=in_seconds(47))
    done, _, _ = cluster.submit(*RUN, PREFLIGHT="0", **late)
    assert done.returncode == 0 and "45 s before the time limit" in done.stdout, done.stdout
    assert done.stdout.endswith(f"{AGAIN}\nrequeued\n")


def test_a_job_gives_up_after_so_many_starts_from_one_checkpoint(cluster, image, launcher_project):
    """A job gives up after MAX_RESTARTS restarts from the same checkpoint. A newer checkpoint resets the count."""
    ends = []
    for restart in range(3):
        if restart == 1:
            commit_empty(launcher_project / "runs/a", 5)
        fails = ranks(FAILED, MAX_RESTARTS="1", SLURM_RESTART_COUNT=str(restart))
        done, _, _ = cluster.submit(*RUN, PREFLIGHT="0", **fails)
        ends.append(done.stdout.splitlines()[-1])
    assert ends == ["requeued", "requeued", "the error"] and done.returncode == 1
    assert "error: gave up after 1 restarts without a checkpoint newer than step_0" in done.stdout


UNFIT = {  # {nodes that can't start a container: (exit code, message)}
    "node1": (0, "error: the container did not start on node1; see above"),
    "node1 node2": (
        2,
        "error: the container did not start on any node; see above. If the image is",
    ),
}


@pytest.mark.parametrize("nodes", UNFIT)
def test_nodes_that_start_no_container(cluster, image, nodes):
    """If the container fails on one node, the job is queued again. If it fails on all nodes, the job ends, because the
    image is probably damaged."""
    code, message = UNFIT[nodes]
    done, _, _ = cluster.submit(*RUN, BROKEN_NODES=nodes)
    assert done.returncode == code and message in done.stdout, done.stdout
    assert done.stdout.endswith("requeued\n") == (code == 0)


# ------------------------------------------------------------------------------------------------ arguments of Slurm and Pyxis


@pytest.mark.slow
def test_what_a_job_asks_of_containers(cluster, image, launcher_project, tmp_path, golden):
    """The steps of a job under nsys have the arguments in steps.yaml. The data of the job contains links to folders
    outside the project, which are mounted.

    Once there is a checkpoint, the folder from which the run was initialised can be missing, and is not mounted.
    """
    lustre = tmp_path.with_name(f"{tmp_path.name}-lustre")
    write_store(lustre / "disk", [range(1, 60)] * 9, vocab_size=64, eos=0, tokenizer="none")
    for name in ("store", "deep", "more"):
        (lustre / name).mkdir()
    (lustre / "store/train").symlink_to(lustre / "disk")
    (lustre / "disk/more").symlink_to(lustre / "deep")
    (launcher_project / "corpus").symlink_to(lustre / "store")
    run = tmp_path / "runs/mine"
    commit_empty(run, 5)
    words = [f"--save_ckpt_path={run}", "--load_ckpt_path=/nowhere/old", "--num_steps=6"]
    environment = {"PROFILE": "nsys", "MOUNTS": f"{lustre}/more", "PREFLIGHT": "0"}
    done, asked, _ = cluster.submit(*words, "--dataset_path=corpus", **environment)
    assert done.returncode == 0 and done.stdout.endswith(f"finished: {run}\n"), done.stdout
    # Pyxis removes this container with the job.
    for node in ("node1", "node2"):
        assert cluster.containers(node) == ["pyxis_77_mamba-train-77.0"]
    places = {"PROJECT": launcher_project, "LUSTRE": lustre, "FOLDER": tmp_path}
    golden.check_entry(
        "steps.yaml", "a profiled training", describe_steps(asked, places), flow=False
    )
    assert (run / "profile").is_dir()


@pytest.mark.slow
def test_a_first_try_makes_its_corpus_and_leaves_no_container(
    cluster, image, launcher_project, golden
):
    """A job without arguments in a fresh checkout makes its data and trains, with the steps in steps.yaml.

    If Pyxis keeps containers, the job removes its own and those of ended jobs. PROFILE=torch becomes a setting.
    """
    used = ["pyxis_mamba-train-78.0", "pyxis_mamba-train-79.1", "pyxis_of-someone"]
    for name in ("pyxis_mamba-train-12.3", *used):
        (cluster.folder / "state/node2" / name).mkdir()
    done, asked, unpacked = cluster.submit(SCOPE="global", PROFILE="torch", PREFLIGHT="0")
    assert done.returncode == 0, done.stdout
    assert (launcher_project / "data/builtin/asked").read_text() == "builtin data/builtin"
    assert sorted(unpacked) == ["node1", "node2"], "each node unpacks the image once"
    places = {"PROJECT": launcher_project, "FOLDER": launcher_project.parent}
    golden.check_entry("steps.yaml", "a first try", describe_steps(asked, places), flow=False)
    assert cluster.containers("node1") == [] and cluster.containers("node2") == used
    (training,) = cluster.trainings()
    assert training["settings"]["report"]["use_profiler"]
    assert training["settings"]["checkpoint"]["save_ckpt_path"] == "runs/demo"


@pytest.mark.slow
def test_a_check_ends_before_the_training(cluster, launcher_project):
    """`1.train.sbatch --check` checks the nodes, runs the tokenizer on a free node, and ends without training and
    without files."""
    script = launcher_project / "1.train.sbatch"
    check = [script, "--check", "--save_ckpt_path=runs/a"]
    done = run_program(*check, **cluster.environment)
    assert done.returncode == 0, done.stdout
    assert "node 1     node2: 0 GPUs, 0 EFA devices" in done.stdout
    assert done.stdout.splitlines()[-1] == "ready to train"
    (launcher_project / "get_dataset.py").write_text("raise SystemExit('TypeError: no')")
    done = run_program(*check, **cluster.environment, PREFLIGHT="0")
    last = done.stdout.splitlines()[-1]
    assert done.returncode == 1
    assert last == "error: the tokenizer failed on node1: TypeError: no"
    asked = (cluster.folder / "record").read_text()
    assert "mamba_fsdp.launch.node" not in asked and asked.count('"--nodelist=node1"') == 4
    assert not any((launcher_project / name).exists() for name in ("runs", "data"))
    done = run_program(*check, PATH=str(cluster.image))
    assert done.returncode == 2 and "this machine has no salloc command" in done.stderr


def test_tokenizing_with_nothing_but_the_image(cluster, image, launcher_project, tmp_path, golden):
    words = [f"{tmp_path}/texts/*.txt", f"{tmp_path}/stores/mine", "--tokenizer=gpt2"]
    done, asked, unpacked = cluster.submit(*words, script="2.tokenize.sbatch", SCOPE="global")
    assert done.returncode == 0, done.stdout
    assert (tmp_path / "stores/mine/asked").read_text() == " ".join(words)
    places = {"PROJECT": launcher_project, "FOLDER": tmp_path}
    golden.check_entry("steps.yaml", "tokenizing", describe_steps(asked, places), flow=False)
    assert unpacked == ["node1"] and not cluster.containers("node1")


# ------------------------------------------------------------------------------------------------ where the settings are resolved

WITHOUT_YAML = f"""#!/bin/sh
case "$*" in *yaml*) exit 1 ;; esac
exec {sys.executable} "$@"
"""


@pytest.mark.slow
def test_settings_are_read_on_a_host_without_an_environment_or_else_in_the_image(
    cluster, image, launcher_project
):
    """Without a .venv, the host's own Python reads the settings, in order to report a mistake before any node unpacks
    the image. If this Python has no PyYAML, they are read in the image."""
    environment = (
        launcher_project / ".environment"
    )  # the environment in the image; the host does not see it
    (launcher_project / ".venv").rename(environment)
    stand_in = cluster.image / "python3"
    stand_in.write_text(stand_in.read_text().replace(".venv", environment.name))
    python = cluster.folder / "commands/python3"
    python.symlink_to(sys.executable)
    done, asked, _ = cluster.submit("--num_stepss=3")
    assert done.returncode == 2 and not asked and "did you mean num_steps" in done.stdout
    python.unlink()
    write_program(python, WITHOUT_YAML)
    done, asked, _ = cluster.submit("--num_stepss=3", *RUN)
    assert done.returncode == 2 and asked and "did you mean num_steps" in done.stdout
    done, _, _ = cluster.submit(*RUN, PREFLIGHT="0")
    assert done.returncode == 0, done.stdout
    (training,) = cluster.trainings()
    assert training["explicit"] == ["num_steps", "save_ckpt_path", "use_dummy_dataset"]


def test_a_slurm_that_runs_no_images_is_told_at_once(cluster, image):
    write_program(cluster.folder / "commands/srun", "#!/bin/sh\n")
    for command in ("1.train.sbatch --check", "1.train.sbatch", "2.tokenize.sbatch in"):
        script, *words = command.split()
        done, _, _ = cluster.submit(*words, script=script)
        assert done.returncode == 2, done.stdout
        (line,) = done.stdout.splitlines()
        assert line.startswith("error: Slurm can't run images here"), line


# ------------------------------------------------------------------------------------------------ removals

# One removal hangs on storage that does not respond. The other takes longer than REMOVAL_SECONDS but makes progress.
ENROOT = r"""#!/bin/bash
[ "$1" = list ] && printf 'pyxis_mamba-train-%s\n' hangs works && exit
case $3 in
*hangs) sleep 600 ;;
*) for _ in {1..9}; do : {1..100000}; sleep 0.3; done ;;
esac
echo "removed $3"
"""


@pytest.mark.slow
def test_a_removal_lasts_for_as_long_as_it_makes_progress(project, tmp_path):
    write_program(tmp_path / "enroot", ENROOT)
    done = subprocess.run(
        [
            sys.executable,
            "-I",
            project / "mamba_fsdp/launch/node_guard.py",
            "99.0",
            "localhost",
            "1",
        ],
        env={
            "PATH": f"{tmp_path}:{os.environ['PATH']}",
            "REMOVAL_SECONDS": "2",
            "GUARD_SECONDS_TO_CONNECT": "0",
        },
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.stdout.splitlines() == ["removed pyxis_mamba-train-works"], done.stderr


@pytest.mark.parametrize(
    "signal, seconds_left, granted",
    [
        ("", 100.0, 3600.0),
        ("TERM", 100.0, 10.0),
        ("USR1", 100.0, 55.0),
        ("USR1", 40.0, 10.0),
        ("USR1", None, 10.0),  # None: an overloaded controller does not answer
    ],
)
def test_a_removal_ends_before_slurm_ends_the_job(signal, seconds_left, granted):
    """A removal of containers ends early enough to queue the job again after USR1, and before Slurm kills the job after
    TERM."""
    assert seconds_for_removal(signal, seconds_left) == granted
