import math

import pytest

from benchmarks import checkpoint


@pytest.mark.slow
def test_a_tiny_run_gives_numbers_that_can_be(tmp_path, capsys):
    """Ratios of times that were taken, however long anything stood still; and nothing is left in the folder."""
    (row,) = checkpoint.main(["--gib=0.02", "--ranks=2", "--rounds=1", f"--folder={tmp_path}"])
    assert (row["gib"], row["ranks"]) == (0.02, 2) and 1 <= row["bytes"] < 1.01
    assert all(
        0 < row[name] < math.inf
        for name in ("dd_rate", "save_rate", "save", "cold", "warm", "stall")
    )
    assert 0 <= row["slower"] < math.inf
    assert f"{row['save']:.1%}" in capsys.readouterr().out and not list(tmp_path.iterdir())
