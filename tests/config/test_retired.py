"""A setting that is gone is told to whoever gives it, and passed over where an older run's config.yaml holds it."""

import pytest

from config import resolve, retired
from config.retired import Retired
from mamba_fsdp.errors import UserError


@pytest.fixture(autouse=True)
def gone(monkeypatch):
    monkeypatch.setitem(retired.RETIRED, "was_here", Retired("1", "do this instead"))
    monkeypatch.setitem(retired.RETIRED_VALUES, ("tracker", "telex"), "tensorboard has it")


def test_one_that_a_user_gives_is_refused_with_what_to_do(tmp_path):
    file = tmp_path / "mine.yaml"
    for content in ("was_here: 1\n", "training: {was_here: 2}\n"):
        file.write_text(content)
        with pytest.raises(UserError, match=r"was_here: no longer a setting \(in .*\); do this"):
            resolve.resolve_settings({}, str(file))
    with pytest.raises(UserError, match="was_here: no longer a setting .on the command line"):
        resolve.resolve_settings({"training.was_here": "1"})
    with pytest.raises(UserError, match="tracker=telex: no longer there .* tensorboard has it"):
        resolve.resolve_settings({"tracker": "wandb,telex"})


def test_in_the_file_of_an_older_run_it_is_passed_over(tmp_path):
    file = tmp_path / "config.yaml"
    text = resolve.as_yaml(resolve.resolve_settings({"tracker": "tensorboard"})[0])
    for value, notes in (("1", []), ("2", ["was_here=2 is no longer a setting"])):
        file.write_text(text.replace("training:\n", f"training:\n  was_here: {value}\n"))
        settings, _ = resolve.resolve_settings({}, str(file))
        assert [note.partition(" and ")[0] for note in settings.notes] == notes
    file.write_text(text.replace("tracker:\n", "tracker:\n  - telex\n"))
    settings, _ = resolve.resolve_settings({}, str(file))
    assert settings.report.tracker == ["tensorboard"] and "telex" in settings.notes[0]


def test_what_was_retired_is_gone_or_can_go():
    """Each default is how a run's config.yaml has it, so that a file with defaults alone gives no notes."""
    usual = {
        name: resolve.shown(resolve.default(name))
        for name in retired.RETIRED.keys() & resolve.all_settings().keys()
    }
    assert usual == {name: retired.RETIRED[name].usual for name in usual}
