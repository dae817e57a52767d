"""The commands of docs/evaluating.md run as they are written."""

import json
import re
import shlex

import pytest

from mamba_fsdp import command_line
from mamba_fsdp.verbs import evaluate, generate

pytestmark = pytest.mark.slow


@pytest.fixture(scope="session")
def used(tmp_path_factory):
    from tests.verbs import conftest

    return conftest.used.__wrapped__(tmp_path_factory)


def test_commands_run(used, project, monkeypatch, capsys):
    import datasets

    monkeypatch.chdir(used)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(
        datasets,
        "load_dataset",
        lambda name, *_, split, **__: datasets.Dataset.from_dict(
            {"text": [f" = {split} {n} = \n" for n in range(9)]}
        ),
    )
    page = (project / "docs/evaluating.md").read_text()
    (used / "mytasks").mkdir()
    (used / "mytasks/choose.yaml").write_text(re.search(r"```yaml\n(.*?)```", page, re.S)[1])
    (used / "mytasks/rows.jsonl").write_text(
        "".join(json.dumps({"name": f"line_{n}"}) + "\n" for n in range(5))
    )
    commands = [shlex.split(line) for line in page.splitlines() if " -m mamba_fsdp " in line]
    assert len(commands) == 10
    for words in commands:
        verb, *rest = words[words.index("mamba_fsdp") + 1 :]
        rest = rest[: rest.index(">")] if ">" in rest else rest
        if any("--tasks" in word for word in rest):
            pytest.importorskip("lm_eval")
            monkeypatch.undo()
            monkeypatch.chdir(used)
        with pytest.raises(SystemExit) as exit:
            command_line.run(
                {"evaluate": evaluate, "generate": generate}[verb].main, lambda: "", rest
            )
        told = capsys.readouterr()
        assert exit.value.code == 0 and told.out, (words, told.err)
        assert ("samples" in json.loads(told.out)) if "--json" in rest else "{" not in told.out[:1]
