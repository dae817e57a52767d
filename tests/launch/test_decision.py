"""Tests mamba_fsdp.launch.decision: what becomes of a job in each state in which its training can end."""

import pytest

from mamba_fsdp.launch.decision import (
    Action,
    JobState,
    TrainingOutcome,
    decide,
    should_restart_ranks,
)

END = Action.END
AGAIN = Action.QUEUE_AGAIN
USUAL = JobState(
    code=0,
    outcome=TrainingOutcome(),
    run_folder="/runs/a",
    newest="step_00000005",
    newest_before="start",
    restarts=0,
    max_restarts=3,
)
NOTHING_LEFT = TrainingOutcome()
FINISHED = TrainingOutcome("finished")
STOPPED_BY_FILE = TrainingOutcome("stopped", stop_file=True)
STOPPED_BY_A_SIGNAL = TrainingOutcome("stopped")
CRASHED = TrainingOutcome("failed", 1, "rank 1 on node2: It exited with code 1", error="Error\n")
LATE = {"seconds_run": 7000.0, "seconds_left": 290.0}
EARLY = {"seconds_run": 5.0, "seconds_left": 360.0}
NO_PROGRESS = {"newest_before": "step_00000005", "restarts": 3}


def ended(code=0, outcome=NOTHING_LEFT, **known):
    """Returns a JobState. If the launchers have written an outcome, the exit code of the outcome replaces `code`, as in
    slurm_training.py."""
    return USUAL._replace(code=outcome.code if outcome.status else code, outcome=outcome, **known)


TABLE = {  # {event: (state of the job, action, exit code, start of the message)}
    "all steps are done": (ended(outcome=FINISHED), END, 0, "finished: /runs/a"),
    "done, and asked to stop meanwhile": (
        ended(outcome=FINISHED, stop_signal="USR1"),
        END,
        0,
        "finished",
    ),
    "a file STOP": (
        ended(outcome=STOPPED_BY_FILE),
        END,
        0,
        "stopped at step_00000005 as requested by the file",
    ),
    "a file STOP, and a rank fails": (
        ended(outcome=TrainingOutcome("stopped", 1, "rank 1", True)),
        END,
        1,
        "ended at step_00000005: the file STOP requested it, but a rank failed",
    ),
    "a mistake that a rank finds": (
        ended(outcome=TrainingOutcome("failed", 2)),
        END,
        2,
        "not queued again",
    ),
    "a replay that found a difference": (ended(3), END, 3, "not queued again"),
    "a rank crashes": (ended(outcome=CRASHED), AGAIN, 0, "queued again, to resume from step_0"),
    "a launcher is killed": (ended(137), AGAIN, 0, "queued again"),
    "SIGTERM to another node": (ended(143, STOPPED_BY_A_SIGNAL), AGAIN, 0, "queued again"),
    "USR1 before the time limit": (
        ended(outcome=STOPPED_BY_A_SIGNAL, stop_signal="USR1", **LATE),
        AGAIN,
        0,
        "queued again",
    ),
    "USR1 by hand": (
        ended(outcome=STOPPED_BY_A_SIGNAL, stop_signal="USR1", seconds_run=5.0, seconds_left=361.0),
        AGAIN,
        0,
        "queued again",
    ),
    "USR1 at once, by --time=5": (
        ended(outcome=STOPPED_BY_A_SIGNAL, stop_signal="USR1", **EARLY),
        END,
        2,
        "error: Slurm requested a stop 5 s after the start and 360 s before the time limit, which leaves no time",
    ),
    "USR1, start after start without a checkpoint": (
        ended(143, stop_signal="USR1", **LATE, **NO_PROGRESS),
        END,
        1,
        "error: gave up after 3 restarts",
    ),
    "scancel": (
        ended(outcome=STOPPED_BY_A_SIGNAL, stop_signal="TERM", is_running=False),
        END,
        143,
        "ended at step_00000005 by Slurm or by a user",
    ),
    "TERM to the script alone": (
        ended(outcome=STOPPED_BY_A_SIGNAL, stop_signal="TERM"),
        AGAIN,
        0,
        "queued again",
    ),
    "Ctrl-C in salloc": (
        ended(outcome=STOPPED_BY_A_SIGNAL, stop_signal="INT"),
        END,
        143,
        "ended at",
    ),
    "crashes without a new checkpoint": (
        ended(outcome=CRASHED, **NO_PROGRESS),
        END,
        1,
        "error: gave up after 3 restarts without a checkpoint newer than step_00000005 (MAX_RESTARTS=3)",
    ),
    "crashes with a new checkpoint": (ended(outcome=CRASHED, restarts=3), AGAIN, 0, "queued again"),
}


@pytest.mark.parametrize("happened", TABLE)
def test_what_becomes_of_a_job(happened):
    state, action, code, sentence = TABLE[happened]
    decision = decide(state)
    assert (decision.action, decision.exit_code) == (action, code)
    assert decision.sentence.startswith(sentence)


IN_PLACE = {  # {event: (state of the job, checkpoint of the last restart, whether the ranks are restarted)}
    "a rank crashes": (ended(outcome=CRASHED), "", True),
    "again, with a new checkpoint": (ended(outcome=CRASHED), "step_00000004", True),
    "again, without one": (ended(outcome=CRASHED), "step_00000005", False),
    "MAX_RESTARTS=0": (ended(outcome=CRASHED, max_restarts=0), "", False),
    "a launcher is killed": (ended(137), "", True),
    "a rank's node is at fault": (ended(outcome=TrainingOutcome("failed", 75)), "", False),
    "srun itself fails": (ended(1), "", False),
    "SIGTERM to another node": (ended(143, STOPPED_BY_A_SIGNAL), "", False),
    "a mistake": (ended(outcome=TrainingOutcome("failed", 2)), "", False),
    "asked to stop": (ended(outcome=CRASHED, stop_signal="USR1"), "", False),
    "a file STOP": (ended(outcome=TrainingOutcome("stopped", 1, "rank 1", True)), "", False),
}


@pytest.mark.parametrize("happened", IN_PLACE)
def test_when_ranks_start_again_in_place(happened):
    """Ranks are restarted within the job only after a failure of a rank or launcher, and once for each new
    checkpoint."""
    state, restarted_from, expected = IN_PLACE[happened]
    assert should_restart_ranks(state, restarted_from) == expected
