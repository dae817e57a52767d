"""The commands of docs/evaluating.md run as they are written."""

import json
import re
import shlex

import pytest

import get_dataset
from mamba_fsdp.verbs import evaluate, export, generate
from tests.verbs.conftest import used  # noqa: F401 (a fixture)

pytestmark = pytest.mark.slow
VERBS = {
    "evaluate": evaluate,
    "export": export,
    "generate": generate,
    "get_dataset.py": get_dataset,
}


def test_commands_run(used, project, monkeypatch, answer):  # noqa: F811
    monkeypatch.chdir(used)
    page = (project / "docs/evaluating.md").read_text()
    commands = re.findall(r"^\.venv/bin/.* (?:-m mamba_fsdp |(?=get_dataset))(.*)", page, re.M)
    assert len(commands) == 8
    for command in commands:
        verb, *rest = shlex.split(command)
        if ">" in rest:
            rest = rest[: rest.index(">")]
        code, out, err = answer(VERBS[verb], *rest)
        assert code == 0 and out, (command, err)
        if "--json" in rest:
            assert "data" in json.loads(out)
