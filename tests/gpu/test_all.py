"""benchmarks.gpu: one part that hangs or fails takes no other along. tests/nullgpu runs every part through."""

import pytest

from benchmarks.gpu import __main__ as everything


@pytest.mark.slow
def test_each_part_has_its_own_end(tmp_path, monkeypatch):
    monkeypatch.setitem(everything.LIMITS, "values", 0.1)
    assert everything.run_part("values", tmp_path, True) == "stopped after 0.1 s"
    monkeypatch.setitem(everything.LIMITS, "no-preset", 60)
    outcome = everything.run_part("no-preset", tmp_path, False)
    assert outcome == "ended with 1, see no-preset.log"
    assert "Traceback" in (tmp_path / "no-preset.log").read_text()


def test_a_machine_without_the_tools_does_the_rest(tmp_path, monkeypatch):
    """No ncu, no git. All that a call leaves are its logs and a summary."""
    monkeypatch.setattr(everything.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(everything.torch.cuda, "get_device_name", lambda: "a GPU")
    monkeypatch.setattr(everything.torch.version, "cuda", "13.0")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("sys.argv", ["gpu", "--only=ncu,sanitizer", f"--out={tmp_path / 'out'}"])
    (tmp_path / "out").mkdir()
    (tmp_path / "out/sanitizer.md").write_text("| a row |\n")
    assert everything.main() == 1
    (summary,) = (tmp_path / "out").iterdir()
    said = summary.read_text()
    assert said.startswith("a GPU; torch") and "commit not known here" in said
    assert "## ncu: there is no ncu\n" in said
    assert "## sanitizer: there is no compute-sanitizer\n\n| a row |\n" in said


def test_each_call_ends_within_ten_minutes():
    """Its parts' limits and 50 seconds of its own; each part belongs to a call."""
    parts = [name for names in everything.CALLS.values() for name in names]
    assert sorted(parts) == sorted(everything.LIMITS)
    for names in everything.CALLS.values():
        assert sum(map(everything.LIMITS.get, names)) <= 550
