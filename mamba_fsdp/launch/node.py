"""One node's share of a run: torchrun with a rank for each GPU, and the error of the rank that failed first on record.

    python -m mamba_fsdp.launch.node FAILURES [torchrun options] training.py [--SETTING=VALUE ...]

When a rank fails, the others fail for its sake soon after, and the log is full of their errors. Each node writes the
first of its own into the folder FAILURES, as a file whose name sorts by time; the launcher ends the log with the first.
"""

import contextlib
import datetime
import logging
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from pathlib import Path

from mamba_fsdp.launch.forks import REQUESTS_TO_STOP, Rank, prepare
from mamba_fsdp.launch.machine import node_name, set_environment

if __name__ == "__main__":  # what ranks are forks of imports torch, which takes seconds, while this process does
    came: list[int] = []  # what is imported may take SystemExit for a failure of its own

    def leave(number, _):
        came.append(number)
        sys.exit(128 + number)  # which removes what has been made so far

    for number in REQUESTS_TO_STOP:
        signal.signal(number, leave)
    scratch = tempfile.TemporaryDirectory(prefix="mamba-train-")
    set_environment(sys.argv[2:], scratch.name)
    prepare()

from torch.distributed import run as torchrun
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.api import PContext, SignalException, SubprocessHandler
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousClosedError, RendezvousError, dynamic_rendezvous

from mamba_fsdp.errors import UserError
from mamba_fsdp.parallel.world import allow_many_files, attempt
from mamba_fsdp.run_layout import CHECKPOINTS, LOCAL, committed
from mamba_fsdp.storage import write_atomically
from mamba_fsdp.train.run_folder import RunFolder

SECONDS_FOR_OTHERS = 3  # Slurm ends the job with the first node that exits: let the others put their errors on record
SECONDS_TO_MEET_AGAIN = 30  # after a failure: else a node is lost
ENDED_BY_LAUNCHER = -signal.SIGTERM  # of ranks that still ran when another failed, or only started when asked to stop
USUAL_REASONS = {
    "SIGKILL": " The usual reason is that the node ran out of memory: lower batch_size.",
    "SIGBUS": " The usual reason is a file of the token store that was cut short, or whose disk failed, while it was "
              "read: python -m mamba_fsdp inspect STORE --verify; or a full /dev/shm.",
}


def main(failures: Path, words: list[str], scratch: str) -> int:
    logging.disable(logging.ERROR)  # torchrun's own account of a failure: ours comes last and says more
    allow_many_files()
    processes, alone = int(os.environ["PROCESSES_PER_NODE"]), "--standalone" in words
    options = torchrun.parse_args([f"--nproc-per-node={processes}", f"--log-dir={scratch}/ranks",
                                   "--monitor-interval=0.1", "--max-restarts=1", *words])
    os.environ["FAILURES"] = str(failures)
    asked = pass_requests_on()
    noted = restart_in_place(failures, asked, alone, processes)
    meet_fast(int(options.nnodes.split(":")[-1]))
    try:
        torchrun.run(options)
    except ChildFailedError:
        if not noted:
            return 128 + asked[0]
        RunFolder(failures.parent.parent).status()  # which a rank that was killed has left `running`
        if not alone:
            time.sleep(SECONDS_FOR_OTHERS)
        return noted[-1]
    except RendezvousClosedError:  # another node has given up
        return 1
    except RendezvousError as error:
        text = (f"error: {node_name()} could not meet the other nodes: {error} ({error.__cause__}); can it reach "
                "the first node by its name, and does the firewall or security group let the nodes connect?\n")
        return put_on_record(failures, 1, time.time(), text, 1)
    except SignalException as error:  # it came while torchrun was starting the ranks, and knows not yet of them
        for rank in multiprocessing.active_children():
            rank.kill()  # else the interpreter waits for them
        return 128 + error.sigval
    return 128 + asked[0] if asked else 0


def meet_fast(nodes: int) -> None:
    """Let each node look for the others up to ten times a second, and all together a hundred times, where torchrun has
    once a second, which each start waits for; and let it name no events, which nobody sees, from the call stack. What
    another version of torch has otherwise stays as it is."""
    pause = min(1.0, max(0.1, nodes / 100))
    ours = {"_delay": lambda *_, **__: time.sleep(pause), "get_method_name": lambda *_, **__: ""}
    vars(dynamic_rendezvous).update({name: ours[name] for name in ours if hasattr(dynamic_rendezvous, name)})
    holder = getattr(dynamic_rendezvous, "_BackendRendezvousStateHolder", meet_fast).__init__
    if getattr(holder, "__defaults__", None) == (1,):  # seconds for which it believes what it has read
        holder.__defaults__ = (pause,)


def restart_in_place(failures: Path, asked: list[int], alone: bool, processes: int) -> list[int]:
    """Make torchrun note a failure and start the ranks of all nodes again after it, in this job and on these nodes; but
    once only for each new checkpoint (`alone`: since this start), not after a user's mistake or a request to stop.

    Whatever else runs on a node is ended at once: by itself torchrun leaves the other ranks 30 s in which they can only
    wait for the lost one. Returns the list that will hold the exit codes of failures."""
    monitor, close, ended, noted = LocalElasticAgent._monitor_workers, PContext.close, set(), []
    run = failures.parent.parent

    def saved():
        return attempt(lambda: (committed(run / CHECKPOINTS), [*map(Path.read_text, run.glob(LOCAL))]))

    begun_from = [saved()[0] if alone else None]

    def end(ranks, death_sig=None, timeout=30):
        running = [rank.proc for rank in ranks.subprocess_handlers.values() if rank.proc.poll() is None and not asked]
        for rank in running:
            ended.add(rank.pid)
            rank.send_signal(signal.SIGKILL)
        for rank in running:  # which takes each a while to end that holds a GPU
            rank.wait(timeout)
        close(ranks, death_sig, timeout)

    def note(agent, group):
        result = monitor(agent, group)
        if result.is_failed():
            first, rank, failure = min((moment_of(failure), rank, failure) for rank, failure in result.failures.items()
                                       if failure.pid not in ended)
            newest, wrong = saved()
            mends = not (asked or wrong or failure.exitcode == UserError.exit_code or newest == begun_from[0]
                         or os.environ.get("MAX_RESTARTS") == "0")
            if not (asked and failure.exitcode == ENDED_BY_LAUNCHER):
                has_said_it = alone and processes == 1 and failure.exitcode > 0 and not mends  # right above
                text = "" if has_said_it else f"rank {rank} on {node_name()} failed first.\n{describe(failure)}\n"
                code = failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode
                noted.append(put_on_record(failures, *first, text, code))
            if wrong:
                print(f"error: {wrong}", file=sys.stderr, flush=True)
            agent._remaining_restarts, begun_from[0] = int(mends), newest
            os.environ.pop("START_PARTS", None)  # what the launcher took is told once
            with contextlib.suppress(AttributeError):  # where torch keeps it elsewhere
                group.spec.rdzv_handler._settings.timeout._join = datetime.timedelta(seconds=SECONDS_TO_MEET_AGAIN)
        return result

    LocalElasticAgent._monitor_workers, PContext.close = note, end
    return noted


def pass_requests_on() -> list[int]:
    """Make torchrun pass requests to stop on to its ranks, then wait for them and those of other nodes as ever; SIGTSTP
    (Ctrl-Z) makes them and it stand still until it gets SIGCONT.

    By itself it kills ranks 30 s after the request, be it in the middle of a step or of a checkpoint. How long they may
    take is for Slurm to say, which kills all of us in the end. Returns the list that will hold the requests."""
    start, asked = PContext.start, []
    SubprocessHandler._popen = lambda handler, words, environment: Rank(words, environment)

    def start_and_listen(ranks):
        for environment in ranks.envs.values():
            environment["RANKS_BEGAN"] = str(time.time())

        def tell(number):
            for rank in ranks.subprocess_handlers.values():
                rank.proc.send_signal(number)

        def pass_on(number, _frame):
            asked.append(number)
            # SIGQUIT is for those who won't wait; of the others, SIGINT twice is no request, it ends a rank.
            tell(signal.SIGKILL if number == signal.SIGQUIT else signal.SIGTERM)

        def stand_still(_number, _frame):  # ranks are in sessions of their own, which no terminal stops
            tell(signal.SIGSTOP)
            os.kill(os.getpid(), signal.SIGSTOP)
            tell(signal.SIGCONT)

        start(ranks)
        signal.signal(signal.SIGTSTP, stand_still)
        for number in REQUESTS_TO_STOP:  # instead of torchrun's own, which raise SignalException
            signal.signal(number, pass_on)
        if asked:  # since those before them ended
            pass_on(asked.pop(), None)

    PContext.start = start_and_listen
    return asked


def put_on_record(failures: Path, order: int, moment: float, text: str, code: int) -> int:
    """Write this node's first failure to FAILURES/ORDER-TIME-NODE-exitCODE.txt. Returns this process's exit code: 1, or
    where nothing can be written there, `code`, and the log has the text."""
    try:
        failures.mkdir(parents=True, exist_ok=True)
        write_atomically(failures / f"{order}-{moment:.3f}-{node_name()}-exit{code}.txt", text)
    except (OSError, UserError):
        print(text, end="", file=sys.stderr, flush=True)
        return code
    return 1


def moment_of(failure: ProcessFailure) -> tuple[int, float]:
    """What failures sort by: (0 for a killed rank and 1 for others, seconds since the epoch). A killed rank can't say
    when it died, and the others complain before anyone has looked at it: it comes first."""
    killed = failure.exitcode < 0 and failure.exitcode not in (ENDED_BY_LAUNCHER, -signal.SIGABRT)
    file = Path(failure.error_file)
    return (0 if killed else 1), file.stat().st_mtime if file.is_file() else time.time()


def describe(failure: ProcessFailure) -> str:
    if failure.exitcode < 0:
        name = signal.Signals(-failure.exitcode).name
        return f"It was ended by {name}.{USUAL_REASONS.get(name, '')}"
    if isinstance(failure.message, str):  # it left no error file
        return f"It ended with exit code {failure.exitcode}; what it said stands above."
    return failure.message["extraInfo"]["py_callstack"].rstrip()


if __name__ == "__main__":
    for number in REQUESTS_TO_STOP:  # it looks for other nodes in C, which serves no handler
        signal.signal(number, signal.SIG_DFL)
    raise SystemExit(128 + came[0] if came else main(Path(sys.argv[1]), sys.argv[2:], scratch.name))
