"""What becomes of a job: decided from what is known when its training has ended. No I/O. For the cluster's own
Python, see host.py."""

from enum import Enum
from typing import NamedTuple

MISTAKE = 2  # the exit code of what no restart fixes
NODE_FAULT = 75  # of a rank whose own node is at fault: errors.NodeFault
DIFFERENT = 3  # of a replay that found a difference
KILLED = 137  # of a launcher that SIGKILL has ended, and with it its ranks
ENDED = 143  # of a job that Slurm or a person has ended
# Slurm sends USR1 so long before the time limit, as the header of 1.train.sbatch asks, and up to a minute earlier.
LEAD_SECONDS = 300 + 60


class Outcome(NamedTuple):
    """What the launchers of the nodes have left of a training, in the file that launch/node.py writes."""

    status: str = ""  # the run's, as in status.json; "" if a killed launcher has left nothing
    code: int = 0  # of the rank that failed first
    lost_rank: str = ""  # this rank, and why it failed
    stop_file: bool = False  # whether somebody has asked for the end by the run's file STOP
    error: str = ""  # the lines that end the log
    node: str = ""  # of the rank that failed first


class Ending(NamedTuple):
    """What is known at the end of a training, or of what comes before it."""

    code: int
    outcome: Outcome
    run_folder: str
    newest: str  # checkpoint, as in step_00000005; "start" without one
    newest_before: str  # at the start of the job
    restarts: int  # starts of the job in a row from the same checkpoint, without the first
    max_restarts: int
    asked: str = ""  # the signal that asked the job to stop, without SIG
    is_running: bool = True  # false if Slurm already ends the job, or has queued it again
    seconds_run: float = float("inf")  # of this start, when it was asked to stop
    seconds_left: float = float("inf")  # until the time limit, then

    @property
    def lost(self) -> str:
        """Names what failed first: a rank, or a launcher that could leave nothing."""
        return self.outcome.lost_rank or "a launcher, which was killed"


class Action(Enum):
    """What the job does next."""

    END = "end"
    QUEUE_AGAIN = "queue again"


class Decision(NamedTuple):
    """What the job says and does at its end."""

    action: Action
    exit_code: int
    sentence: str
    shows_error: bool = True  # the first error of all nodes, below the sentence
    forgets: bool = False  # what the job keeps for its next start


def decide(ending: Ending) -> Decision:
    """Returns what becomes of the job."""
    outcome = ending.outcome
    if ending.code == 0 and outcome.status == "finished":
        return Decision(Action.END, 0, "finished: " + ending.run_folder, False, forgets=True)
    if ending.asked:
        return _decide_asked(ending)
    if ending.code == 0 and outcome.stop_file:
        sentence = "stopped at {} as the file STOP asked; sbatch the same command to resume"
        return Decision(Action.END, 0, sentence.format(ending.newest), False, forgets=True)
    if ending.code in (MISTAKE, DIFFERENT):
        sentence = "not queued again, since no restart can fix this"
        return Decision(Action.END, ending.code, sentence, forgets=True)
    if outcome.status == "stopped" and outcome.stop_file:  # as much of it as the failure left
        sentence = (
            "ended at {}: the file STOP asked, and a rank failed meanwhile; sbatch the same command to "
            "resume"
        )
        return Decision(Action.END, 1, sentence.format(ending.newest), forgets=True)
    return _queue_again(ending)  # with code 0 too: ranks that a node's shutdown has ended


def _decide_asked(ending: Ending) -> Decision:
    """Returns what becomes of a job that a signal has asked to stop."""
    if ending.asked == "INT" or not ending.is_running:
        sentence = (
            "ended at {} by Slurm or by hand; if Slurm does not resume it, sbatch the same command"
        )
        return Decision(Action.END, ENDED, sentence.format(ending.newest), forgets=True)
    leaves_no_time = (
        ending.seconds_left <= LEAD_SECONDS and ending.seconds_run < ending.seconds_left
    )
    if ending.asked == "USR1" and leaves_no_time:
        sentence = (
            f"error: Slurm asked to stop {ending.seconds_run:.0f} s after the start and {ending.seconds_left:.0f} s before the time limit, which leaves "
            "no time to train; sbatch the same command with a longer --time, or with a shorter notice, as in "
            "--signal=B:USR1@60"
        )
        return Decision(Action.END, MISTAKE, sentence, forgets=True)
    return _queue_again(ending)


def _queue_again(ending: Ending) -> Decision:
    """Returns that the job is queued again, or that it gives up if its starts make no progress."""
    if ending.restarts >= ending.max_restarts and ending.newest == ending.newest_before:
        sentence = (
            f"error: gave up after {ending.restarts} restarts without a checkpoint newer than {ending.newest} (MAX_RESTARTS={ending.max_restarts}); fix the "
            "cause, then sbatch the same command to resume"
        )
        return Decision(Action.END, 1, sentence, forgets=True)
    return Decision(Action.QUEUE_AGAIN, 0, "queued again, to resume from " + ending.newest)


def starts_again_in_place(ending: Ending, restarted_from: str) -> bool:
    """Returns whether the ranks start again as a new step of the same job: once for each new checkpoint, after a
    rank or a launcher failed.

    restarted_from: the newest checkpoint when they did so last; "" if they never did.
    """
    outcome = ending.outcome
    if ending.asked or outcome.stop_file or ending.code in (0, MISTAKE, DIFFERENT, NODE_FAULT):
        return False
    if not outcome.status and ending.code != KILLED:
        return False
    return ending.max_restarts != 0 and restarted_from != ending.newest
