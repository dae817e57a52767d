"""Tests the verb `plan`: its output, and that its recommended settings have the promised memory and speed."""

import re
import shlex

import pytest

from mamba_fsdp.trainer import run
from mamba_fsdp.verbs import plan, train

P4D = "--instance=p4d.24xlarge"
TWO_NODES = f"demo {P4D} --nodes=2 --hours_between_failures=100"
EVENTS = """\
{"event": "started", "step": 0}
{"event": "checkpoint", "step": 10, "seconds": 40.0}
{"event": "checkpoint", "step": 20, "seconds": 60.0}
{"event": "checkpoint", "step": 30, "seconds": 999.0}
{"event": "stopped", "step": 30}
{"event": "lost_node", "step": 31, "seconds_to_next_step": 90.0}
"""
METRICS = """\
{"step": 20, "checkpoint_stall_seconds": 3.0}
{"step": 30, "checkpoint_stall_seconds": 5.0}
"""
COSTS = """
           save            4.000 s  measured
           write          50.000 s  measured
           recovery       90.000 s  measured
           queue         300.000 s  assumed
interval     seconds   goodput  without spares
"""


@pytest.fixture
def run_plan(call):
    """Returns a function run_plan(arguments) that returns (exit code, output)."""
    return lambda words: call(plan, *shlex.split(words))


@pytest.mark.slow
def test_a_plan_that_does_not_fit_suggests_settings_that_fit(run_plan):
    code, output = run_plan(f"mamba_9.8b {P4D} --nodes=24 --batch_size=2")
    assert code == 1 and "it does NOT fit; the largest part: activations" in output
    best = re.search(r"^best +24 +(\d+) +([\d/]+) ", output, re.M)
    code, output = run_plan(
        f"mamba_9.8b {P4D} --nodes=24 --batch_size={best[1]} --fsdp_activation_checkpointing=true "
        f"--selective_checkpointing={best[2]}"
    )
    assert code == 0 and "a device: it fits" in output


@pytest.mark.torch22
def test_sizes_for_this_machine_are_timed_and_their_commands_run(
    run_plan, call, in_user_folder, monkeypatch
):
    monkeypatch.setattr(run, "MIN_TIMED_STEPS", 3)
    monkeypatch.setattr(run, "MIN_TIMED_SECONDS", 0)
    code, output = run_plan("data/builtin --hours=0.001 --batch_size=1")
    assert code == 0 and "timed" in output and "smaller          2 x 64" in output
    assert "The time is too short" in output
    program, verb, *words = shlex.split(output.splitlines()[-1])
    assert (program, verb) == ("mamba-fsdp", "train")
    code, output = call(train, *words, "--dry_run=true")
    assert code == 0 and "tokens; " in output, output


def test_the_cost_of_failures_uses_times_measured_by_a_run(run_plan, tmp_path):
    """The cost of failures is computed from the saves and the recovery of a measured run. The last save of the run is
    not counted, because the metrics do not contain the stall of this save."""
    (tmp_path / "events.jsonl").write_text(EVENTS)
    (tmp_path / "metrics.jsonl").write_text(METRICS)
    code, output = run_plan(f"{TWO_NODES} --checkpoint_interval=7 --measured={tmp_path}")
    assert code == 0 and COSTS in output and "failures   0.48 a day, " in output
    # Young's interval is the square root of 2 * 4 s * 50 hours: a save takes 4 s, and one of the two nodes fails every 50 hours.
    assert re.search(
        r"^Young +1,200\.0 +99\.26% +99\.09%  --checkpoint_interval=\d+$", output, re.M
    )
    assert "--checkpoint_interval=7\n" in output
