import pytest

from benchmarks import checkpoint


@pytest.mark.slow
def test_a_tiny_run_gives_numbers_that_can_be(tmp_path, capsys):
    """Ratios of times that were taken, none that is 0 or absurd; and nothing is left in the folder."""
    row, = checkpoint.main(["--gib=0.02", "--ranks=2", "--rounds=1", f"--folder={tmp_path}"])
    assert (row["gib"], row["ranks"]) == (0.02, 2) and 1 <= row["bytes"] < 1.01
    assert all(0.001 < row[name] < 50 for name in ("dd_rate", "save_rate", "save", "cold", "warm"))
    assert 0 < row["stall"] < 20 and row["slower"] >= 0
    assert f"{row['save']:.1%}" in capsys.readouterr().out and not list(tmp_path.iterdir())
