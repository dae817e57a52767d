"""Runs every command of README.md and docs/models.md, in order, in a fresh clone. Checks that the files and modules
that README.md names exist."""

import os
import re
import subprocess

import pytest

from tests.readme.pages import IN_A_CLONE, Shell, commands_to_run
from tests.support.processes import run_program
from tests.support.projects import PROJECT, edit, make_venv, shorten_corpus

# The thousand steps of the demo take minutes. This many steps suffice to show that it learns.
DEMO_STEPS = 25


def shorten_the_demo(clone):
    edit(clone / "config/demo.yaml", "num_steps: 1000", f"num_steps: {DEMO_STEPS}")
    shorten_corpus(clone)
    identity = ["-c", "user.name=test", "-c", "user.email=test@localhost"]
    subprocess.run(["git", *identity, "commit", "-qam", "Shorter"], cwd=clone, check=True)


@pytest.fixture(scope="session")
def clone(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fresh") / "clone"
    subprocess.run(["git", "clone", "--quiet", str(PROJECT), str(folder)], check=True)
    shorten_the_demo(folder)
    # The environment of the tests was made by 0.create_env.sh, so it is not downloaded again.
    make_venv(folder)
    (folder / "mytexts").mkdir()
    for name in range(150):
        lines = [f"Once {n} words of {name} were told {n * n} times.\n" for n in range(400)]
        (folder / f"mytexts/{name}.txt").write_text("".join(lines))
    return folder


def test_it_is_short_and_fits_a_terminal(project):
    lines = (project / "README.md").read_text().splitlines()
    assert len(lines) <= 150 and max(map(len, lines)) <= 80


# {part of a command: arguments to append}. The user's own model is neither trained to the end nor evaluated on all its data.
SHORTER = {
    "--save_ckpt_path=runs/mine": " --eval_batches=2 --num_steps=5",
    "--save_ckpt_path=runs/tuned": " --eval_batches=2",
}


@pytest.mark.slow
def test_every_command_runs_in_a_fresh_clone(clone, monkeypatch):
    """Every command works in a fresh clone, and makes only files that git ignores. 0.create_env.sh and 1.train.sbatch
    start the programs of the clone. A program of .venv is forked from a process that has its imports."""
    for name in [*os.environ]:
        if name.startswith(("MAMBA_FSDP_", "VIRTUAL_ENV")):
            monkeypatch.delenv(name)
    shell = Shell(clone)
    commands = [command for page in IN_A_CLONE for command in commands_to_run(page)]
    assert commands[0].text == "./0.create_env.sh && ./1.train.sbatch"
    check_demo(shell.run(commands[0].text), clone)
    for command in commands[1:]:
        text = command.text
        if command.language == "python":
            program = clone.parent / "program.py"
            program.write_text(text)
            text = f".venv/bin/python {program}"
        for setting, words in SHORTER.items():
            if setting in text:
                text += words
        output = shell.run(text)
        if command.language == "python":
            sample, numbers = output.rsplit("\n", 2)[:2]
            assert len(sample) > 10 and len(numbers.split()) == 2
    untracked = run_program("git", "status", "--porcelain", cwd=clone).stdout
    assert untracked == "", f"git does not ignore these files of the commands: {untracked}"


def check_demo(output, clone):
    """Asserts that the perplexity falls, and that there are a committed checkpoint, a sample of text, and the files
    that the page lists."""
    found = re.findall(r"perplexity ([\d,.]+) ", output)
    perplexities = [float(number.replace(",", "")) for number in found]
    assert perplexities[-1] * 5 < perplexities[0]
    run = clone / "runs/demo"
    assert list(run.glob("checkpoints/step_*/COMMIT"))
    assert (run / f"pth/step_{DEMO_STEPS:08}/consolidated.00.pth").exists()
    assert "def " in output
    last_lines = "\n".join(output.strip().splitlines()[-6:])
    assert all(word in last_lines for word in ("runs/demo", "data/", "--help"))


def test_what_it_names_exists(project):
    text = (project / "README.md").read_text()
    for target in re.findall(r"\]\(([^)]+)\)", text):
        assert (project / target).exists(), target
    for module in re.findall(r"python -m (benchmarks\.\w+)", text):
        path = project / module.replace(".", "/")
        assert path.with_suffix(".py").exists() or (path / "__main__.py").exists(), module
