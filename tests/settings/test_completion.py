"""Tests that completion for bash offers the same verbs and options as the help pages."""

import sys

import pytest

from tests.support.processes import run_program, write_program

COMMAND = '#!/bin/sh\nexec {python} -m mamba_fsdp "$@"\n'


COMPLETIONS = {  # {arguments of a command, as bash splits them: some of the completions of the last argument}
    "ge": "generate",
    "generate --to": "--top_k= --top_p= --tokenizer=",
    "plan --schedule =": "cosine wsd linear",
    "plan runs/a --schedule = cos": "cosine",
    "plan --tracker = t": "tensorboard",
    "checkpoints runs/a --verify =": "true false",
    "plan --d_model =": "",
    "nosuch --x": "",
}


@pytest.mark.parametrize("line", COMPLETIONS)
def test_it_completes_names_and_choices(project, tmp_path, line):
    words = line.split()
    found = COMPLETIONS[line].split()
    command = write_program(tmp_path / "mamba-fsdp", COMMAND.format(python=sys.executable))
    quoted = " ".join(f'"{word}"' for word in [command, *words])
    code = f"""
source '{project}/mamba_fsdp/launch/completion.bash'
compopt() {{ :; }} # it only works in an interactive shell
COMP_WORDS=({quoted})
COMP_CWORD={len(words)}
_mamba_fsdp
printf '%s\\n' "${{COMPREPLY[@]}}"
"""
    done = run_program("bash", "-c", code, PYTHONPATH=str(project))
    offered = done.stdout.split()
    assert set(found) <= set(offered) and bool(found) == bool(offered), done
    assert done.stderr == ""
