"""Decides what happens to a job when its training has ended. This code does no I/O.

This module runs on the cluster's own Python; host.py describes the restrictions.
"""

from enum import Enum
from typing import NamedTuple

# Exit codes
EXIT_USER_ERROR = 2  # no restart fixes the error
EXIT_NODE_FAULT = 75  # the node of the rank is faulty, see errors.NodeFault
EXIT_REPLAY_DIFFERS = 3  # a replay computed other values than the run
EXIT_SIGKILL = 137  # SIGKILL ended a launcher, and with it its ranks
EXIT_SIGTERM = 143  # Slurm or a person ended the job
# The header of 1.train.sbatch requests USR1 300 s before the time limit, and Slurm sends it up to a minute
# earlier.
MAX_NOTICE_SECONDS = 300 + 60


class TrainingOutcome(NamedTuple):
    """How a training ended. The launchers of the nodes write it to outcome.json."""

    # The status in status.json; "" if the launcher was killed before it could report.
    status: str = ""
    code: int = 0  # exit code of the rank that failed first
    lost_rank: str = ""  # the rank that failed first, and the reason
    stop_file: bool = False  # whether the file STOP in the run folder requested the end
    error: str = ""  # the error message to print at the end of the log
    node: str = ""  # node of the rank that failed first


class JobState(NamedTuple):
    """The facts about a training, or about its preparation, that `decide` needs."""

    code: int  # exit code of the rank that failed first, or else of the command that ran the ranks
    outcome: TrainingOutcome
    run_folder: str
    newest: str  # the newest checkpoint, such as step_00000005, or "start" if there is none
    newest_before: str  # the newest checkpoint when this start of the job began
    restarts: int  # consecutive restarts of the job from the same checkpoint
    max_restarts: int
    stop_signal: str = ""  # the signal that requested a stop, such as "USR1"; "" without one
    is_running: bool = True  # False if Slurm is already ending the job or has queued it again
    # Run time of this start of the job when the stop was requested.
    seconds_run: float = float("inf")
    seconds_left: float = float("inf")  # time until the job's time limit, at the same moment

    @property
    def lost(self) -> str:
        """The rank that failed first, or a description of a launcher that was killed without a report."""
        return self.outcome.lost_rank or "a launcher, which was killed"


class Action(Enum):
    """The next action of the job."""

    END = "end"
    QUEUE_AGAIN = "queue again"


class JobDecision(NamedTuple):
    """The message and the action with which the job ends."""

    action: Action
    exit_code: int
    sentence: str
    prints_error: bool = True  # whether to print the first error of all nodes after the sentence


def decide(state: JobState) -> JobDecision:
    """Returns the decision about the job in this state."""
    outcome = state.outcome
    if state.code == 0 and outcome.status == "finished":
        return JobDecision(Action.END, 0, "finished: " + state.run_folder, False)
    if state.stop_signal:
        return _decide_stop_signal(state)
    if state.code == 0 and outcome.stop_file:
        sentence = "stopped at {} as requested by the file STOP; sbatch the same command to resume"
        return JobDecision(Action.END, 0, sentence.format(state.newest), False)
    if state.code in (EXIT_USER_ERROR, EXIT_REPLAY_DIFFERS):
        sentence = "not queued again, because no restart can fix the error above"
        return JobDecision(Action.END, state.code, sentence)
    # The file STOP requested the end, but a rank failed before the run had stopped.
    if outcome.status == "stopped" and outcome.stop_file:
        sentence = (
            "ended at {}: the file STOP requested it, but a rank failed before it had stopped; sbatch the same command to "
            "resume"
        )
        return JobDecision(Action.END, 1, sentence.format(state.newest))
    # The exit code can be 0 here, because ranks exit with 0 after a node that shuts down has asked them to stop.
    return _queue_again(state)


def _decide_stop_signal(state: JobState) -> JobDecision:
    """Returns the decision for a job that a signal asked to stop."""
    if state.stop_signal == "INT" or not state.is_running:
        sentence = "ended at {} by Slurm or by a user; if Slurm does not resume it, sbatch the same command"
        return JobDecision(Action.END, EXIT_SIGTERM, sentence.format(state.newest))
    leaves_no_time = (
        state.seconds_left <= MAX_NOTICE_SECONDS and state.seconds_run < state.seconds_left
    )
    if state.stop_signal == "USR1" and leaves_no_time:
        sentence = (
            f"error: Slurm requested a stop {state.seconds_run:.0f} s after the start and {state.seconds_left:.0f} s before the time limit, which leaves "
            "no time to train; sbatch the same command with a longer --time or a shorter notice, such as "
            "--signal=B:USR1@60"
        )
        return JobDecision(Action.END, EXIT_USER_ERROR, sentence)
    return _queue_again(state)


def _queue_again(state: JobState) -> JobDecision:
    """Returns the decision to queue the job again, or to give up if its starts make no progress."""
    if state.restarts >= state.max_restarts and state.newest == state.newest_before:
        sentence = (
            f"error: gave up after {state.restarts} restarts without a checkpoint newer than {state.newest} (MAX_RESTARTS={state.max_restarts}); fix the "
            "cause, then sbatch the same command to resume"
        )
        return JobDecision(Action.END, 1, sentence)
    return JobDecision(Action.QUEUE_AGAIN, 0, "queued again, to resume from " + state.newest)


def should_restart_ranks(state: JobState, restarted_from: str) -> bool:
    """Returns whether the ranks are restarted as a new step of the same job.

    After a rank or a launcher has failed, the ranks are restarted once for each new checkpoint.

    restarted_from: the newest checkpoint at the previous restart; "" if there was none.
    """
    outcome = state.outcome
    if (
        state.stop_signal
        or outcome.stop_file
        or state.code in (0, EXIT_USER_ERROR, EXIT_REPLAY_DIFFERS, EXIT_NODE_FAULT)
    ):
        return False
    if not outcome.status and state.code != EXIT_SIGKILL:
        return False
    return state.max_restarts != 0 and restarted_from != state.newest
