"""1.train.sbatch and 2.tokenize.sbatch with an image: what Slurm's container plugin is asked for, and how often."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from mamba_fsdp.launch.slurm_training import seconds_for_removal
from tests.support import projects
from tests.support.checkpoints import commit_empty
from tests.support.corpora import write_store
from tests.support.processes import write_program
from tests.support.pyxis import OLDEST_PYXIS, PYXIS_OPTIONS, SQUASHFS, make_cluster


@pytest.fixture
def cluster(launcher_project, tmp_path):
    """Two nodes with an image beside the script; the project lies in a folder with a space in its name."""
    (launcher_project / "mamba-train.sqsh").write_bytes(SQUASHFS)
    return make_cluster(tmp_path / "cluster", launcher_project)


@pytest.fixture
def submit(cluster):
    """submit(*settings, **environment) -> (finished process, the words of each step in a container)."""

    def run(*settings, **environment):
        done, asked, _ = cluster.submit(*settings, **environment)
        return done, [
            words for words in asked if any(word.startswith("--container-image=") for word in words)
        ]

    return run


def option(words, name):
    """The value of --name=VALUE, which must be there once."""
    (value,) = [word.split("=", 1)[1] for word in words if word.startswith(f"--{name}=")]
    return value


def mounted(words):
    """The folders of --container-mounts, which are seen under their own names."""
    pairs = [mount.split(":") for mount in option(words, "container-mounts").split(",")]
    assert all(source == target for source, target in pairs)
    return [source for source, _ in pairs]


@pytest.mark.slow
def test_what_a_job_asks_of_containers(submit, cluster, launcher_project, tmp_path):
    """On HyperPod, which replaces nodes by itself, under nsys, with data behind links that lead out of the project. A
    folder that is gone, such as what the run began with, needs no mount once there is a checkpoint."""
    script = launcher_project / "mamba_fsdp/launch/slurm.py"
    projects.edit(script, '"/opt/sagemaker_cluster"', repr(str(tmp_path)))
    store = tmp_path.parent / f"{tmp_path.name}-lustre/store"
    store.mkdir(parents=True)
    disk = store.with_name("disk")
    deep = store.with_name("deep")
    write_store(disk, [range(1, 60)] * 9, vocab_size=64, eos=0, tokenizer="none")
    deep.mkdir()
    (store / "train").symlink_to(disk)
    (disk / "more").symlink_to(deep)
    (disk / "loop").symlink_to("loop")
    (launcher_project / "corpus").symlink_to(store)
    run = tmp_path / "runs/mine"
    commit_empty(run, 5)
    words = [f"--save_ckpt_path={run}", "--load_ckpt_path=/nowhere/old", "--num_steps=6"]
    done, asked = submit(*words, "--dataset_path=corpus", HIDDEN=str(store.parent), PROFILE="nsys")
    assert done.returncode == 0 and done.stdout.endswith(f"finished: {run}\n"), done.stdout
    assert done.stdout.count(f"follow {disk}/loop -> {disk}/loop: this leads nowhere") == 1
    for node in ("node1", "node2"):  # Pyxis removes it with the job
        assert cluster.containers(node) == ["pyxis_77_mamba-train-77.0"]
    start, *later = asked
    assert mounted(start) == [str(tmp_path)], "which what the words of the command name lies in"
    assert len(later) == 3, "the nodes' reports, their comparison, the training"
    for words in later:
        wanted = [tmp_path, deep, disk, store]
        assert sorted(mounted(words)) == sorted(map(str, wanted))
    for words in asked:
        assert option(words, "container-image") == f"{launcher_project}/mamba-train.sqsh"
        assert option(words, "container-name") == "mamba-train-77.0:no_exec"
        assert option(words, "container-workdir") == str(launcher_project)
        assert "--no-container-mount-home" in words
    training = asked[-1]
    of_srun = {"--nodes=2", "--ntasks-per-node=1", "--kill-on-bad-exit=1", "--auto-resume=1"}
    assert of_srun <= set(training)
    profile = f"--output={run}/profile/nsys_77.0_%h"
    at = training.index(f"{launcher_project}/1.train.sbatch")
    assert training[at + 1 : at + 5] == ["nsys", "profile", "--trace=cuda,nvtx", profile]
    start = training.index("mamba_fsdp.launch.node")
    run_folder, *options = training[start + 1 :]
    assert run_folder == str(run) and (run / "profile").is_dir()
    assert {"--nnodes=2", "--rdzv-id=77.0", "--rdzv-endpoint=node1:20077"} <= set(options)
    assert options[-2:] == ["training.py", f"--resolved={run}/starts/77.0/settings.json"]
    assert not (run / "starts").exists()


@pytest.mark.slow
def test_a_first_try_makes_its_corpus_and_leaves_no_container(cluster, launcher_project):
    """Bare, in a fresh checkout. Where Pyxis keeps containers the job removes its own and those of ended jobs; torch's
    profile is a setting."""
    left = "pyxis_mamba-train-12.3"
    used = ["pyxis_mamba-train-78.0", "pyxis_mamba-train-79.1", "pyxis_of-someone"]
    for name in (left, *used):
        (cluster.folder / "state/node2" / name).mkdir()
    done, asked, unpacked = cluster.submit(SCOPE="global", PROFILE="torch")
    assert done.returncode == 0, done.stdout
    made = launcher_project / "data/builtin"
    assert (made / "asked").read_text() == "builtin data/builtin"
    assert sum(f"{launcher_project}/get_dataset.py" in words for words in asked) == 1
    assert sorted(unpacked) == ["node1", "node2"], "each node unpacks the image once"
    assert len([words for words in asked if "77.0" in words]) == 1, "the keeper's step"
    assert cluster.containers("node1") == [] and cluster.containers("node2") == used
    (training,) = cluster.trainings()
    assert training["settings"]["report"]["use_profiler"]
    assert not any("--auto-resume=1" in words for words in asked)


# One takes longer than a removal may stand still, but works; one waits for storage that no longer answers.
ENROOT = r"""#!/bin/bash
[ "$1" = list ] && printf 'pyxis_mamba-train-%s\n' works hangs works-too && exit
case $3 in
*hangs) sleep 600 ;;
*) for _ in {1..12}; do : {1..100000}; sleep 0.3; done ;;
esac
echo "removed $3"
"""


@pytest.mark.slow
def test_a_removal_lasts_for_as_long_as_it_makes_progress(project, tmp_path):
    write_program(tmp_path / "enroot", ENROOT)
    done = subprocess.run(
        [sys.executable, "-I", project / "mamba_fsdp/launch/keeper.py", "99.0"],
        env={"PATH": f"{tmp_path}:{os.environ['PATH']}", "REMOVAL_SECONDS": "2"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
    )
    said = ["removed pyxis_mamba-train-works", "removed pyxis_mamba-train-works-too"]
    assert done.stdout.splitlines() == said, done.stderr


@pytest.mark.parametrize(
    "asked, left, granted",
    [
        ("", 100.0, 3600.0),
        ("TERM", 100.0, 10.0),
        ("INT", 100.0, 10.0),
        ("USR1", 100.0, 55.0),
        ("USR1", 40.0, 10.0),
        ("USR1", None, 10.0),  # a busy controller does not say
    ],
)
def test_a_removal_ends_before_slurm_ends_the_job(asked, left, granted):
    """After USR1 the job must still be queued again."""
    assert seconds_for_removal(asked, left) == granted


def test_no_option_is_newer_than_the_oldest_pyxis(project):
    assert max(PYXIS_OPTIONS.values()) <= OLDEST_PYXIS
    files = ("mamba_fsdp/launch/containers.py", "docs/image.md")
    text = "".join((project / name).read_text() for name in files)
    assert set(re.findall(r"--((?:no-)?container-[a-z-]+)", text)) <= PYXIS_OPTIONS.keys()


CONTAINER = """
import os, sys
sys.path.insert(0, os.getcwd())
from mamba_fsdp.launch import containers
from mamba_fsdp.launch.host import Mistake, choose_environment, read_variables
try:
    variables = read_variables(os.environ)
    image = choose_environment(variables.image).image
    folders = variables.mounts + sys.argv[1:] + containers.folders_behind_links(sys.argv[1:])
    print(*containers.container_options(image, "77.0", folders), sep="\\n")
except Mistake as mistake:
    sys.exit(f"error: {mistake}")
"""


def container(project, *paths, **environment):
    """(finished process, the options for a container in which `paths` are wanted), as a job finds them."""
    done = subprocess.run(
        [sys.executable, "-c", CONTAINER, *paths],
        cwd=project,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    return done, done.stdout.splitlines()


def test_names_that_no_mount_can_have_are_covered_by_the_folder_above(
    cluster, launcher_project, tmp_path
):
    """Pyxis 0.24 writes a space as \\040 by itself, 0.20 does not and a shell reads it; a comma ends a mount."""
    folder = f"{tmp_path}-disk/odd"
    for name in ("a b", "a,b", "a:b", "a$b", "a#b", "a'b", "a\\b"):
        os.makedirs(f"{folder}/{name}/store")
        done, words = container(launcher_project, f"{folder}/{name}/store")
        assert done.returncode == 0, done.stdout
        assert mounted(words) == [str(tmp_path), folder], name


def test_links_to_many_folders_need_a_name_for_all(cluster, launcher_project, tmp_path):
    """One word of a command holds all mounts, and Linux bounds its length. What lies in a mount needs none of its own."""
    folder = Path(f"{tmp_path}-disk")
    for number in range(10):
        (folder / f"at/{number}").mkdir(parents=True)
        (tmp_path / f"links/{number}").parent.mkdir(exist_ok=True)
        (tmp_path / f"links/{number}").symlink_to(folder / f"at/{number}")
    script = launcher_project / "mamba_fsdp/launch/containers.py"
    projects.edit(script, "LONGEST_LIST = 100000", "LONGEST_LIST = 500")
    done, (error,) = container(launcher_project, f"{tmp_path}/links")
    assert done.returncode == 1 and "lead to 11 folders, such as " in error, done.stdout
    more = {"MOUNTS": f"{folder}/at/,\n{tmp_path}", "FSX_MOUNT": f"{folder}/at:{folder}/at"}
    done, words = container(launcher_project, f"{tmp_path}/links", **more)
    assert mounted(words) == [str(tmp_path), f"{folder}/at/"], done.stdout


def test_links_are_followed_to_their_end_and_hide_nothing_of_the_images(
    cluster, launcher_project, tmp_path
):
    """Also a chain of links, one that leads back, and the links of a named link's folder."""
    folder = tmp_path.parent / f"{tmp_path.name}-disk"
    for name in ("real", "files", "hop", "end"):
        (folder / name).mkdir(parents=True)
    (folder / "end/x.txt").touch()
    links = {
        "named": "real",
        "real/back": "../named",
        "real/a": f"{folder}/files",
        "files/b": "../hop/x.txt",
        "hop/x.txt": f"{folder}/end/x.txt",
        "real/python3": "/usr/bin/env",
        "real/gone": "nowhere/shard",
    }
    for name, target in links.items():
        (folder / name).symlink_to(target)
    done, (warning, *words) = container(launcher_project, str(folder / "named"))
    ends = {folder / name for name in ("named", "real", "files", "hop", "end")}
    assert set(mounted(words)) == {str(path) for path in (tmp_path, *ends)}, done.stdout
    assert warning.startswith("warning: the container can't follow ") and "links: 2" in warning
    done, (warning, error) = container(launcher_project, str(folder / "real/gone"))
    assert f"{folder}/real/gone -> {folder}/real/nowhere/shard: this leads nowhere" in warning
    assert done.returncode == 1 and error.startswith(f"error: there is no {folder}/real/gone on")


@pytest.mark.parametrize(
    "folder, environment, said",
    [
        ("/my data", {}, "/my data: the container would need /, which is the image's own"),
        ("/opt/my data", {}, "/opt/my data: the container would need /opt, which is the image's"),
        ("", {"MOUNTS": "/usr/bin/"}, "/usr/bin/: the container would need /usr/bin/, which is"),
        ("/nowhere/old-run", {}, "there is no /nowhere/old-run on"),
        ("", {"FSX_MOUNT": "/mnt/lustre:/fsx"}, "write /mnt/lustre:/mnt/lustre"),
        ("", {"DATA_PATH": "data"}, "DATA_PATH or FSX_MOUNT: data: expected the whole path of a"),
        ("", {"MOUNTS": "my data"}, "MOUNTS, DATA_PATH or FSX_MOUNT: my data: expected the whole"),
        ("", {"IMAGE": "new.sqsh"}, "the project/new.sqsh is no squashfs image"),
        ("", {"IMAGE": "old.sqsh"}, "IMAGE=old.sqsh: there is no such file"),
        ("", {"IMAGE": "short.sqsh"}, "the project/short.sqsh was cut short; copy it again"),
    ],
)
def test_what_no_container_can_have_is_refused(
    cluster, launcher_project, folder, environment, said
):
    (launcher_project / "new.sqsh").write_bytes(b"PK")
    (launcher_project / "short.sqsh").write_bytes(SQUASHFS[:-1])
    if " " in folder:
        script = launcher_project / "mamba_fsdp/launch/containers.py"
        projects.edit(script, "        if not os.path.exists(path):\n", "        if False:\n")
    done, _ = container(launcher_project, *filter(None, [folder]), **environment)
    assert done.returncode == 1 and said in done.stdout, done.stdout
    assert len(done.stdout.splitlines()) == 1


WITHOUT_YAML = f"""#!/bin/sh
case "$*" in *yaml*) exit 1 ;; esac
exec {sys.executable} "$@"
"""


def test_a_host_without_an_environment_shows_the_help_and_finds_typos(cluster, launcher_project):
    """As far as its own Python can read settings; then no node has to unpack the image for them."""
    shutil.rmtree(launcher_project / ".venv")
    python = cluster.folder / "commands/python3"
    python.symlink_to(sys.executable)
    done, asked, _ = cluster.submit("--num_stepss=3", "--seed=7")
    assert done.returncode == 2 and not asked
    assert len(done.stdout.splitlines()) == 1 and "did you mean num_steps" in done.stdout
    done, asked, _ = cluster.submit("--help")
    assert done.returncode == 0 and not asked and "--num_steps" in done.stdout, done.stdout
    python.unlink()
    write_program(python, WITHOUT_YAML)
    done, asked, _ = cluster.submit("--help")
    assert done.returncode == 2 and "./0.create_env.sh" in done.stdout


@pytest.mark.slow
def test_where_no_python_of_the_host_can_the_image_reads_the_settings(cluster, launcher_project):
    write_program(cluster.folder / "commands/python3", WITHOUT_YAML)
    # The image's own environment, which the host does not see.
    stand_in = cluster.image / "python3"
    stand_in.write_text(stand_in.read_text().replace(".venv", ".environment"))
    (launcher_project / ".venv").rename(launcher_project / ".environment")
    done, asked, _ = cluster.submit("--save_ckpt_path=runs/a", "--num_stepss=3")
    assert done.returncode == 2 and "did you mean num_steps" in done.stdout
    assert sum("mamba_fsdp.launch.plan" in words for words in asked) == 1
    done, _, _ = cluster.submit("--save_ckpt_path=runs/a", "--num_steps=3")
    assert done.returncode == 0, done.stdout
    (training,) = cluster.trainings()
    assert training["explicit"] == ["num_steps", "save_ckpt_path"]


def test_an_image_made_from_other_requirements_is_refused(cluster, submit, launcher_project):
    with open(launcher_project / "requirements/cpu.txt", "a") as file:
        file.write("surprise==1\n")
    done, _ = submit()
    assert done.returncode == 2 and not cluster.trainings()
    assert (
        "was made from other requirements than this checkout's" in done.stdout
        and "build and import it again" in done.stdout
    )


def test_a_node_that_cannot_start_the_container_is_named_and_the_job_queued_again(submit, tmp_path):
    """Only so often as MAX_RESTARTS allows. The image may lie elsewhere; further mounts have several names: DATA_PATH and
    FSX_MOUNT, AWS's, do what they do there."""
    fsx = f"{tmp_path}-fsx"
    for name in ("my images", "a", "b", "c", "d"):
        os.makedirs(f"{fsx}/{name}")
    Path(fsx, "my images/i.sqsh").write_bytes(SQUASHFS)
    done, (words,) = submit(
        "--save_ckpt_path=runs/a",
        IMAGE=f"{fsx}/my images/i.sqsh",
        MOUNTS=f"{fsx}/a,{fsx}/b",
        DATA_PATH=f"{fsx}/c",
        FSX_MOUNT=f"{fsx}/d:{fsx}/d",
        BROKEN_NODES="node1",
        MAX_RESTARTS="1",
    )
    assert option(words, "container-image") == f"{fsx}/my images/i.sqsh"
    assert mounted(words)[1:] == [f"{fsx}/{name}" for name in "abcd"]
    assert "error: the container did not start on node1; see above" in done.stdout
    requeued = "queued again, to resume from start\nrequeued\n"
    assert done.returncode == 0 and done.stdout.endswith(requeued), done.stdout
    trouble = {"BROKEN_NODES": "node2", "MAX_RESTARTS": "1", "SLURM_RESTART_COUNT": "1"}
    done, _ = submit("--save_ckpt_path=runs/a", **trouble)
    assert "error: the container did not start on node2; see above" in done.stdout
    given_up = "gave up after 1 restarts without a checkpoint newer than start"
    assert done.returncode == 1 and given_up in done.stdout


def test_an_image_that_starts_on_no_node_ends_the_job_at_once(submit, launcher_project):
    """It is damaged, or Enroot's disk is full: three more starts would find the same."""
    done, _ = submit("--save_ckpt_path=runs/a", BROKEN_NODES="node1 node2")
    assert done.returncode == 2, done.stdout
    assert (
        "error: the container started on no node; see above. If the image is damaged" in done.stdout
    )
    assert done.stdout.endswith("not queued again, since no restart can fix this\n")
    assert not list((launcher_project / "logs").glob("restarts_*"))


def test_without_gpus_nvidias_driver_is_not_asked_for(cluster, launcher_project):
    """The image's own variables ask for it, and Enroot fails on a node without NVIDIA's tools."""
    done, words = container(launcher_project)
    if not Path("/proc/driver/nvidia").exists():
        assert "--container-env=NVIDIA_VISIBLE_DEVICES" in words
    done, words = container(launcher_project, SLURM_GPUS_ON_NODE="8")
    assert "--container-env=NVIDIA_VISIBLE_DEVICES" not in words


def test_tokenizing_with_nothing_but_the_image(cluster, launcher_project, tmp_path):
    """Of a folder with an environment in it, a pattern's matches alone are looked at."""
    fsx = Path(f"{tmp_path}-fsx")
    for name in ("texts/of", "texts/venv", "disk"):
        (fsx / name).mkdir(parents=True)
    (fsx / "disk/others.txt").touch()
    (fsx / "texts/of/others.txt").symlink_to(fsx / "disk/others.txt")
    (fsx / "texts/venv/python3").symlink_to("/usr/bin/env")
    words = [f"{fsx}/texts/*/*.txt", f"{tmp_path}/stores/mine", "--tokenizer=gpt2"]
    done, asked, unpacked = cluster.submit(*words, script="2.tokenize.sbatch", SCOPE="global")
    assert done.returncode == 0, done.stdout
    assert (tmp_path / "stores/mine/asked").read_text() == " ".join(words)
    (step,) = [words for words in asked if "get_dataset.py" in words]
    at = step.index(f"{launcher_project}/1.train.sbatch")
    assert step[at + 1 :] == ["python3", "get_dataset.py", *words]
    wanted = [tmp_path, fsx / "texts", fsx / "disk"]
    assert mounted(step) == [str(path) for path in wanted] and "warning" not in done.stdout
    assert unpacked == ["node1"] and not cluster.containers("node1")


@pytest.mark.parametrize("words", (["*.jsonl", "out", "--delimiter=/"], ["in/[ab]*.txt", "out"]))
def test_a_relative_pattern_needs_no_mount(cluster, launcher_project, tmp_path, words):
    done, asked, _ = cluster.submit(*words, script="2.tokenize.sbatch")
    (step,) = [words for words in asked if "get_dataset.py" in words]
    assert mounted(step) == [str(tmp_path)] and "realpath" not in done.stdout, done.stdout


@pytest.mark.slow
def test_a_check_ends_before_the_training(cluster, launcher_project, project):
    """It tokenizes on the first node by the real get_dataset.py, in the image or with .venv, and leaves nothing."""
    shutil.copy(project / "get_dataset.py", launcher_project)
    trouble = {"BROKEN_NODES": "node2", "SLURM_RESTART_COUNT": "5"}
    done, _, _ = cluster.submit("--check", "--save_ckpt_path=runs/a", **trouble)
    assert (
        done.returncode == 1
        and "did not start on node2" in done.stdout
        and "queued again" not in done.stdout
    )
    done, asked, _ = cluster.submit("--check", "--save_ckpt_path=runs/a")
    assert done.returncode == 0, done.stdout
    assert "node 1     node2: 0 GPUs, 0 EFA devices" in done.stdout
    assert done.stdout.splitlines()[-1] == "fit to train"
    assert not any("mamba_fsdp.launch.node" in words for words in asked)
    (launcher_project / "mamba-train.sqsh").unlink()
    tokenizer = launcher_project / "mamba_fsdp/data/tokenizer.py"
    tokenizer.write_text(tokenizer.read_text().replace("encode_batch_fast(texts", "no_such(texts"))
    done, more, _ = cluster.submit("--check", "--save_ckpt_path=runs/a")
    assert done.returncode == 1 and "fit to train" not in done.stdout, done.stdout
    last = done.stdout.splitlines()[-1]
    assert last.startswith("error: the tokenizer fails on node1: AttributeError: "), last
    in_image, in_venv = [words for words in more if "--splits=official" in words]
    assert "--nodelist=node1" in in_image and "--nodelist=node1" in in_venv
    assert option(in_image, "container-image") and "--container" not in " ".join(in_venv)
    assert not any((launcher_project / name).exists() for name in ("runs/a", "data"))


def test_a_slurm_that_runs_no_images_is_told_at_once(cluster, launcher_project):
    write_program(cluster.folder / "commands/srun", "#!/bin/sh\n")
    said = (
        "error: this Slurm runs no images, since its plugin Pyxis is not switched on: docs/image.md"
    )
    for command in ("1.train.sbatch --check", "1.train.sbatch", "2.tokenize.sbatch in"):
        script, *words = command.split()
        done, _, _ = cluster.submit(*words, script=script)
        assert done.returncode == 2, done.stdout
        (line,) = done.stdout.splitlines()
        assert line.startswith(said) and line.endswith("mamba-train.sqsh, then ./0.create_env.sh")
