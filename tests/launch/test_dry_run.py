"""Tests `1.train.sbatch --dry_run` outside and inside a job: it describes the training and leaves no files."""

import pytest

from tests.support import projects
from tests.support.corpora import write_store
from tests.support.processes import run_program
from tests.support.pyxis import SQUASHFS, make_cluster
from tests.support.tiny import TINY, format_arguments

LAST_LINE = "\ndry run: nothing was trained\n"


@pytest.fixture
def project(tmp_path):
    """Makes a project with the real training program, data, and a run in progress."""
    project = projects.make_project(tmp_path / "the project", training=None)
    projects.make_venv(project)
    write_store(project / "store", [range(1, 60)] * 99, vocab_size=64, eos=0, tokenizer="none")
    (project / "run").mkdir()
    (project / "run/STOP").write_text("for the run that is under way")
    return project


def listing(project):
    """Returns {path: modification time} of everything in the parent of the project folder, without .venv and bytecode.
    Folders have the time None."""
    found = {}
    for path in project.parent.rglob("*"):
        if "__pycache__" not in path.parts and ".venv" not in path.parts:
            found[str(path)] = path.lstat().st_mtime_ns if path.is_file() else None
    return found


@pytest.mark.slow
@pytest.mark.torch22
@pytest.mark.parametrize(
    "called, data, run, expected",
    [
        ("./1.train.sbatch", "store", "run", "\nsteps      3 "),
        (
            "../a_link",
            "data/builtin",
            "new/run\nof two lines",
            "data/builtin, which the run makes first",
        ),
    ],
)
def test_a_dry_run_changes_no_files_and_counts_the_ranks_of_the_training(
    project, called, data, run, expected
):
    (project.parent / "scratch").mkdir()
    (project.parent / "a_link").symlink_to(project / "1.train.sbatch")
    before = listing(project)
    words = format_arguments(TINY | {"num_steps": 3, "dataset_path": data, "save_ckpt_path": run})
    environment = {"PROCESSES_PER_NODE": "3", "TMPDIR": str(project.parent / "scratch")}
    command = [called, *words, "--dry_run", "--batch_size=1"]
    done = run_program(*command, cwd=project, **environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith(LAST_LINE), done.stdout
    assert expected in done.stdout and "fsdp on 3 x cpu" in done.stdout
    assert listing(project) == before


@pytest.mark.slow
def test_in_a_job_it_starts_no_launcher_and_makes_no_files(project, tmp_path_factory):
    """In a job with an image, a dry run describes the ranks of all nodes, starts no launcher, and leaves no files and
    no container."""
    (project / "mamba-train.sqsh").write_bytes(SQUASHFS)
    cluster = make_cluster(tmp_path_factory.mktemp("cluster"), project)
    before = listing(project)
    words = ["--save_ckpt_path=new/run", "--dry_run=True"]
    done, asked, _ = cluster.submit(*words, SCOPE="global", PROCESSES_PER_NODE="2")
    assert done.returncode == 0 and "fsdp on 4 x cpu" in done.stdout, done.stdout
    assert done.stdout.endswith(LAST_LINE)
    assert listing(project) == before
    assert not any("mamba_fsdp.launch.node" in words for words in asked)
    assert not cluster.containers("node1")
