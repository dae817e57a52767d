"""The commands of docs/evaluating.md run as they are written."""

import json
import shlex

import pytest

from mamba_fsdp import command_line
from mamba_fsdp.verbs import evaluate, export, generate
from tests.verbs.conftest import used  # noqa: F401 (a fixture)

pytestmark = pytest.mark.slow
VERBS = {"evaluate": evaluate, "export": export, "generate": generate}


def test_commands_run(used, project, monkeypatch, capsys):  # noqa: F811
    import datasets

    def load(name, *_, split, **__):
        rows = [f" = {split} {n} = \n" for n in range(9)]
        return datasets.Dataset.from_dict({"text": rows})

    monkeypatch.chdir(used)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(datasets, "load_dataset", load)
    page = (project / "docs/evaluating.md").read_text()
    commands = [shlex.split(line) for line in page.splitlines() if " -m mamba_fsdp " in line]
    assert len(commands) == 10
    for words in commands:
        verb, *rest = words[words.index("mamba_fsdp") + 1 :]
        if ">" in rest:
            rest = rest[: rest.index(">")]
        with pytest.raises(SystemExit) as exit:
            command_line.run(VERBS[verb].main, lambda: "", rest)
        told = capsys.readouterr()
        assert exit.value.code == 0 and told.out, (words, told.err)
        if "--json" in rest:
            assert "data" in json.loads(told.out)
