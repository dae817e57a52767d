"""Tests mamba_fsdp.launch.tokenize_job: the part of the input for each task of an array, and the mounts of the
container."""

import pytest

from mamba_fsdp.launch import tokenize_job
from mamba_fsdp.launch.host import LaunchError

# {--array: ((first number, last number, count, step), {number of a task: its part})}
ARRAYS = {
    "0-2": ((0, 2, 3, 1), {0: "0/3", 2: "2/3"}),
    "2-8:3": ((2, 8, 3, 3), {2: "0/3", 5: "1/3", 8: "2/3"}),
    "4": ((4, 4, 1, 1), {4: "0/1"}),
}


def describe(monkeypatch, first, last, count, between, own):
    values = {"MIN": first, "MAX": last, "COUNT": count, "STEP": between, "ID": own}
    for name, value in values.items():
        monkeypatch.setenv(f"SLURM_ARRAY_TASK_{name}", str(value))


@pytest.mark.parametrize("array", ARRAYS)
def test_each_task_of_an_array_has_a_part_of_its_own(monkeypatch, array):
    shape, parts = ARRAYS[array]
    for own, part in parts.items():
        describe(monkeypatch, *shape, own)
        assert tokenize_job.array_part() == part


def test_a_list_of_numbers_is_refused(monkeypatch):
    """A list of task numbers, such as --array=5,9, is refused, because Slurm does not pass the list to the tasks, and
    sets the step to 1."""
    describe(monkeypatch, 5, 9, 2, 1, 9)
    with pytest.raises(LaunchError, match="submit --array=0-1, or a single part"):
        tokenize_job.array_part()


@pytest.mark.parametrize(
    "words, folders",
    [
        ("texts/of/others.txt new/store", ". texts/of/others.txt texts/of disk"),
        ("texts/*/*.txt out", ". texts texts/of disk"),
        ("texts/**/*.txt --tokenizer=disk", "texts disk"),
        ("*.jsonl out --delimiter=/ --shuffle", "."),
        ("texts/o[ab]*.txt", "texts"),
    ],
)
def test_folders_of_the_input_and_targets_of_their_links_are_mounted(
    tmp_path, monkeypatch, words, folders
):
    """The folders of the arguments, of files that match patterns, and of their link targets are mounted. In a folder
    with an environment, only the files that match the pattern are searched for links."""
    for name in ("texts/of", "texts/venv", "disk"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "disk/others.txt").touch()
    (tmp_path / "texts/of/others.txt").symlink_to(tmp_path / "disk/others.txt")
    (tmp_path / "texts/venv/python3").symlink_to("/usr/bin/env")
    monkeypatch.chdir(tmp_path)
    found = tokenize_job.folders_to_mount(words.split())
    assert set(found) == {str(tmp_path / name) for name in folders.split()}
