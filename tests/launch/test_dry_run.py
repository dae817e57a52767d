"""A dry run says what would be trained, however it is asked for, and leaves nothing anywhere."""

import os
import subprocess

import pytest

from tests.support import projects
from tests.support.corpora import write_store
from tests.support.pyxis import SQUASHFS, make_cluster
from tests.support.tiny import TINY, as_words

WAYS = [  # AWS's README writes booleans with a capital
    "--dry_run",
    "--dry_run=true",
    "--dry_run=True",
    "--dry_run=yes",
    "--dry_run=1",
    "--dry-run",
    "--training.dry_run=true",
    "--config=my.yaml",
]
pytestmark = [pytest.mark.slow, pytest.mark.torch22]


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """A project with the real training program, data, a run that is under way, and a folder for temporary files."""
    folder = tmp_path_factory.mktemp("dry")
    project = projects.make_project(folder / "the project", training=None)
    projects.make_venv(project)
    write_store(project / "store", [range(1, 60)] * 99, vocab_size=64, eos=0, tokenizer="none")
    (project / "my.yaml").write_text("training:\n  dry_run: true\n")
    (project / "run").mkdir()
    (project / "run/STOP").write_text("for the run that is under way")
    (folder / "scratch").mkdir()
    return project


def listing(project):
    """What lies in the project's folder, above it and in its folder for temporary files, but for Python's bytecode."""
    found = {}
    for path in project.parent.rglob("*"):
        if "__pycache__" not in path.parts and ".venv" not in path.parts:
            found[str(path)] = path.lstat().st_mtime_ns if path.is_file() else None
    return found


def dry_run(project, *words, **environment):
    """What a dry run says, after which everything is as before."""
    before = listing(project)
    environment = {**os.environ, **environment, "TMPDIR": str(project.parent / "scratch")}
    done = subprocess.run(
        ["./1.train.sbatch", *words], cwd=project, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("\ndry run: nothing was trained\n"), done.stdout
    assert listing(project) == before
    return done.stdout


@pytest.mark.parametrize("way", WAYS)
def test_it_leaves_nothing_however_it_is_asked_for(project, way):
    words = as_words(TINY | {"num_steps": 3, "dataset_path": "store"})
    said = dry_run(project, *words, "--save_ckpt_path=run", way)
    assert "\nsteps      3 " in said, said


def test_it_makes_no_data_and_no_folder_and_counts_the_ranks_to_come(project):
    said = dry_run(
        project, "--save_ckpt_path=new/run\nof two lines", "--dry_run", PROCESSES_PER_NODE="3"
    )
    assert "data/builtin, which the run makes first" in said
    assert "fsdp on 3 x cpu" in said, said


def test_in_a_job_it_starts_no_launcher_and_makes_nothing(project, tmp_path):
    """Inside the image it counts the ranks of all nodes."""
    image = project / "mamba-train.sqsh"
    image.write_bytes(SQUASHFS)
    cluster = make_cluster(tmp_path / "cluster", project)
    before = listing(project)
    done, asked, _ = cluster.submit(
        "--save_ckpt_path=new/run", "--dry_run=True", SCOPE="global", PROCESSES_PER_NODE="2"
    )
    image_removed = listing(project)
    image.unlink()
    assert done.returncode == 0 and "fsdp on 4 x cpu" in done.stdout, done.stdout
    assert done.stdout.endswith("\ndry run: nothing was trained\n")
    assert image_removed == before
    assert not any("mamba_fsdp.launch.node" in words for words in asked)
    assert not cluster.containers("node1")
