"""benchmarks.gpu: one part that hangs or fails takes no other along, and every part runs through on a CPU."""

import pytest

from benchmarks.gpu import __main__ as everything
from benchmarks.gpu import runs
from tests.support.forked import Training


@pytest.mark.slow
def test_each_part_has_its_own_end(tmp_path, monkeypatch):
    monkeypatch.setitem(everything.LIMITS, "values", 0.1)
    assert everything.run_part("values", tmp_path, True) == "stopped after 0.1 s"
    monkeypatch.setitem(everything.LIMITS, "no-preset", 60)
    outcome = everything.run_part("no-preset", tmp_path, False)
    assert outcome == "ended with 1, see no-preset.log"
    assert "Traceback" in (tmp_path / "no-preset.log").read_text()


@pytest.mark.slow
def test_it_is_rehearsed_on_a_cpu(tmp_path, monkeypatch):
    """Each part but `tests` and `sanitizer`, in this process. All calls fit into ten minutes."""
    monkeypatch.setattr(runs, "start", lambda words: Training(words, {}))
    monkeypatch.setenv("TRITON_CACHE_DIR", "")  # which the part changes
    said = ""
    for name in ("values", "ncu", "run", "traces", "mamba-1.4b"):
        everything.measure_part(name, tmp_path, True)
        said += (tmp_path / f"{name}.md").read_text()
    assert (
        "| small | mamba1 | scan | cpp |" in said
        and "| NO |" not in said
        and "Error" not in said.replace("UserError: its kernels need a GPU", "")
    )
    assert (
        "| same bits | same bits |" in said and "| ours | " in said and "| mamba_ssm | - |" in said
    )
    assert (tmp_path / "mamba-1.4b.json").stat().st_size
    assert "commit" in everything.provenance(True)
    assert set(everything.LIMITS) == {name for names in everything.CALLS.values() for name in names}
    assert all(sum(map(everything.LIMITS.get, names)) <= 600 for names in everything.CALLS.values())
