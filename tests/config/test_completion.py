"""Completion for bash knows what the help pages know."""

import os
import subprocess
import sys

import pytest

COMMAND = '#!/bin/sh\nexec {python} -m mamba_fsdp "$@"\n'


@pytest.mark.parametrize(
    "words, found",
    [
        (["ge"], ["generate"]),
        (["generate", "--to"], ["--top_k=", "--top_p=", "--tokenizer="]),
        (["plan", "--schedule", "="], ["cosine", "wsd", "linear"]),
        (["plan", "runs/a", "--schedule", "=", "cos"], ["cosine"]),
        (["plan", "--tracker", "=", "t"], ["tensorboard"]),
        (["checkpoints", "runs/a", "--verify", "="], ["true", "false"]),
        (["plan", "--d_model", "="], []),
        (["nosuch", "--x"], []),
    ],
)
def test_it_completes_names_and_choices(project, tmp_path, words, found):
    command = tmp_path / "mamba-fsdp"
    command.write_text(COMMAND.format(python=sys.executable))
    command.chmod(0o755)
    asked = " ".join(f'"{word}"' for word in [command, *words])
    code = f"""
source '{project}/mamba_fsdp/launch/completion.bash'
compopt() {{ :; }} # which only a line that is typed has
COMP_WORDS=({asked})
COMP_CWORD={len(words)}
_mamba_fsdp
printf '%s\\n' "${{COMPREPLY[@]}}"
"""
    done = subprocess.run(
        ["bash", "-c", code],
        env={**os.environ, "PYTHONPATH": str(project)},
        capture_output=True,
        text=True,
    )
    said = done.stdout.split()
    assert set(found) <= set(said) and bool(found) == bool(said), done
    assert done.stderr == ""
