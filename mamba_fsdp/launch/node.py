"""One node's share of a run: torchrun's agent with a rank for each GPU, and the error of the rank that failed first.

    python -m mamba_fsdp.launch.node FAILURES [torchrun options] training.py [--SETTING=VALUE ...]

When a rank fails, the others fail for its sake soon after, and the log is full of their errors. Each node writes the
first of its own into the folder FAILURES, as a file whose name sorts by time; the launcher ends the log with the first.
"""

import contextlib
import datetime
import json
import logging
import os
import signal
import sys
import tempfile
import time
import uuid
from pathlib import Path
from typing import Any

from mamba_fsdp.launch.forks import REQUESTS_TO_STOP, Rank, prepare
from mamba_fsdp.launch.machine import hold_port, node_name, set_environment

if (
    __name__ == "__main__"
):  # what ranks are forks of imports torch, which takes seconds, while this process does
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
from torch.distributed.elastic.agent.server import (
    RunResult,
    SimpleElasticAgent,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.rendezvous import (
    RendezvousParameters,
    api,
    dynamic_rendezvous,
    registry,
)

from mamba_fsdp.errors import UserError
from mamba_fsdp.parallel.compat import where_ranks_meet
from mamba_fsdp.parallel.world import allow_many_files, attempt
from mamba_fsdp.run_layout import CHECKPOINTS, committed
from mamba_fsdp.storage import write_atomically
from mamba_fsdp.train.run_folder import RunFolder

SECONDS_FOR_OTHERS = 3  # Slurm ends the job with the first node that exits: let the others put their errors on record
SECONDS_TO_MEET_AGAIN = 30  # after a failure: else a node is lost
SECONDS_TO_END = 30  # for a rank that was asked to stop when another one failed
USUAL_REASONS = {
    "SIGKILL": " The usual reason is that the node ran out of memory: lower batch_size.",
    "SIGBUS": " The usual reason is a file of the token store that was cut short, or whose disk failed, while it was "
    "read: python -m mamba_fsdp inspect STORE --verify; or a full /dev/shm.",
}


def main(failures: Path, words: list[str], scratch: str) -> int:
    logging.disable(
        logging.ERROR
    )  # torch's own account of a failure: ours comes last and says more
    allow_many_files()
    os.environ["FAILURES"] = str(failures)  # where the ranks that start after one look for it
    try:
        agent = Agent(failures, words, Path(scratch))
        result = agent.run()
    except api.RendezvousClosedError:  # another node has given up
        return 1
    except api.RendezvousError as error:
        text = (
            f"error: {node_name()} could not meet the other nodes: {error} ({error.__cause__}); can it reach "
            "the first node by its name, and does the firewall or security group let the nodes connect?\n"
        )
        return put_on_record(failures, 1, time.time(), text, 1)
    if not (agent.noted and result and result.is_failed()):
        return (
            128 + agent.asked[0] if agent.asked else int(not result)
        )  # none: another node has given up
    RunFolder(failures.parent.parent).status()  # which a rank that was killed has left `running`
    if not agent.alone:
        time.sleep(SECONDS_FOR_OTHERS)
    return agent.noted[-1]


class Agent(SimpleElasticAgent):
    """torchrun's, which meets those of other nodes and numbers the ranks. Ours are forks, and after a failure those of
    all nodes start again, in this job and on these nodes. After a request to stop torchrun's have 30 s, be it in the
    middle of a checkpoint; ours as long as Slurm lets us."""

    def __init__(self, failures: Path, words: list[str], scratch: Path) -> None:
        options = torchrun.parse_args(
            [
                f"--nproc-per-node={os.environ['PROCESSES_PER_NODE']}",
                "--rdzv-backend=c10d",
                "--monitor-interval=0.1",
                *words,
            ]
        )
        if options.standalone:
            options.rdzv_endpoint, options.rdzv_id = "localhost:0", str(uuid.uuid4())
        config, *_ = torchrun.config_from_args(options)
        meet_fast(config.max_nodes)
        self.nodes = registry.get_rendezvous_handler(
            RendezvousParameters(
                config.rdzv_backend,
                config.rdzv_endpoint,
                config.run_id,
                config.min_nodes,
                config.max_nodes,
                config.local_addr,
                **config.rdzv_configs,
            )
        )
        super().__init__(
            WorkerSpec(
                "rank",
                config.nproc_per_node,
                self.nodes,
                entrypoint=options.training_script,
                max_restarts=1,
                monitor_interval=config.monitor_interval,
            )
        )
        self.words = (sys.executable, "-u", options.training_script, *options.training_script_args)
        self.failures, self.scratch, self.alone = failures, scratch, options.standalone
        self.ranks: dict[int, Rank] = {}  # by their number on this node
        self.asked: list[int] = []  # signals that asked to stop
        self.noted: list[int] = []  # exit codes of failures
        self.begun_from = self._saved()[0] if self.alone else None

    def run(self, *role: str) -> RunResult | None:
        try:
            return super().run(*role)
        finally:
            self.nodes.shutdown()

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, int]:
        address, port = where_ranks_meet(worker_group)
        signal.signal(signal.SIGTSTP, self._stand_still)
        for number in REQUESTS_TO_STOP:
            signal.signal(number, self._pass_on)
        if (
            worker_group.group_rank == 0
        ):  # rank 0 listens there in a few seconds: till then nobody else shall
            self.port = hold_port(int(port))
        self.ranks = {}
        for worker in worker_group.workers:
            self._error_file(worker.local_rank).unlink(missing_ok=True)
            self.ranks[worker.local_rank] = Rank(
                self.words,
                {
                    **os.environ,
                    "RANK": str(worker.global_rank),
                    "WORLD_SIZE": str(worker.world_size),
                    "LOCAL_RANK": str(worker.local_rank),
                    "LOCAL_WORLD_SIZE": str(len(worker_group.workers)),
                    "GROUP_RANK": str(worker_group.group_rank),
                    "MASTER_ADDR": address,
                    "MASTER_PORT": port,
                    "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get(
                        "TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"
                    ),
                    "TORCHELASTIC_RUN_ID": self.nodes.get_run_id(),
                    "RANKS_BEGAN": str(time.time()),
                    "TORCHELASTIC_ERROR_FILE": str(self._error_file(worker.local_rank)),
                },
            )
        if self.asked:  # since those before them ended, or while they started
            self._tell(signal.SIGTERM)
        return {number: rank.pid or 0 for number, rank in self.ranks.items()}

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        codes = [rank.poll() for rank in self.ranks.values()]
        if any(codes):
            # What the end of those says that still run is that they were ended, unless they were asked to stop.
            running = [
                number
                for number, rank in self.ranks.items()
                if rank.poll() is None and not self.asked
            ]
            self._stop_workers()
            self._note(
                {
                    worker.global_rank: worker.local_rank
                    for worker in worker_group.workers
                    if worker.local_rank not in running and self.ranks[worker.local_rank].poll()
                }
            )
            return RunResult(WorkerState.FAILED)
        if None in codes:
            return RunResult(WorkerState.HEALTHY)
        return RunResult(
            WorkerState.SUCCEEDED, {worker.global_rank: None for worker in worker_group.workers}
        )

    def _stop_workers(self, *_: Any, **__: Any) -> None:
        """At once, for what runs beside a lost rank can only wait for it; after a request to stop in some time."""
        for number in [signal.SIGTERM] * bool(self.asked) + [signal.SIGKILL]:
            running = [rank for rank in self.ranks.values() if rank.poll() is None]
            for rank in running:
                rank.send_signal(number)
            until = (
                time.monotonic() + SECONDS_TO_END
            )  # one that holds a GPU takes a while also when it is killed
            for rank in running:
                rank.wait(max(0.0, until - time.monotonic()))

    _shutdown = _stop_workers

    def _tell(self, number: int) -> None:
        for rank in self.ranks.values():
            rank.send_signal(number)

    def _pass_on(self, number, _frame):
        self.asked.append(number)
        # SIGQUIT is for those who won't wait; of the others, SIGINT twice is no request, it ends a rank.
        self._tell(signal.SIGKILL if number == signal.SIGQUIT else signal.SIGTERM)

    def _stand_still(
        self, _number, _frame
    ):  # ranks are in sessions of their own, which no terminal stops
        self._tell(signal.SIGSTOP)
        os.kill(os.getpid(), signal.SIGSTOP)
        self._tell(signal.SIGCONT)

    def _note(self, failed: dict[int, int]) -> None:
        """Put the first failure of these ranks (and their numbers on this node) on record, and make all ranks start
        again after it; but once only for each new checkpoint (on one machine: since this start), not after a user's
        mistake or a request to stop."""
        first, rank = min((self._moment_of(failed[rank]), rank) for rank in failed)
        code = self.ranks[failed[rank]].poll() or 0
        newest, wrong = self._saved()
        mends = not (
            self.asked
            or wrong
            or code == UserError.exit_code
            or newest == self.begun_from
            or os.environ.get("MAX_RESTARTS") == "0"
        )
        if not (self.asked and code == -signal.SIGTERM):  # it had only started
            has_said_it = (
                self.alone and len(self.ranks) == 1 and code > 0 and not mends
            )  # right above
            text = (
                ""
                if has_said_it
                else (
                    f"rank {rank} on {node_name()} failed first.\n"
                    f"{describe(code, self._error_file(failed[rank]))}\n"
                )
            )
            self.noted.append(
                put_on_record(self.failures, *first, text, code if code > 0 else 128 - code)
            )
        if wrong:
            print(f"error: {wrong}", file=sys.stderr, flush=True)
        self._remaining_restarts, self.begun_from = int(mends), newest
        os.environ.pop("START_PARTS", None)  # what the launcher took is told once
        with contextlib.suppress(AttributeError):  # where torch keeps it elsewhere
            self.nodes._settings.timeout._join = datetime.timedelta(seconds=SECONDS_TO_MEET_AGAIN)

    def _moment_of(self, number: int) -> tuple[int, float]:
        """What failures sort by: (0 for a killed rank and 1 for others, seconds since the epoch). A killed rank can't
        say when it died, and the others complain before anyone has looked at it: it comes first."""
        code, file = self.ranks[number].poll() or 0, self._error_file(number)
        killed = code < 0 and code not in (-signal.SIGTERM, -signal.SIGABRT)
        return (0 if killed else 1), file.stat().st_mtime if file.is_file() else time.time()

    def _error_file(self, number: int) -> Path:
        return self.scratch / f"error-{number}.json"

    def _saved(self) -> Any:
        """(what the run's checkpoints are, None), or (None, why that can't be read)."""
        run = self.failures.parent.parent
        return attempt(lambda: committed(run / CHECKPOINTS))


def meet_fast(nodes: int) -> None:
    """Let each node look for the others up to ten times a second, and all together a hundred times, where torchrun has
    once a second, which each start waits for; and let it name no events, which nobody sees, from the call stack. What
    another version of torch has otherwise stays as it is."""
    pause = min(1.0, max(0.1, nodes / 100))
    ours = {"_delay": lambda *_, **__: time.sleep(pause), "get_method_name": lambda *_, **__: ""}
    vars(dynamic_rendezvous).update(
        {name: ours[name] for name in ours if hasattr(dynamic_rendezvous, name)}
    )
    holder = getattr(dynamic_rendezvous, "_BackendRendezvousStateHolder", meet_fast).__init__
    if getattr(holder, "__defaults__", None) == (
        1,
    ):  # seconds for which it believes what it has read
        holder.__defaults__ = (pause,)


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


def describe(code: int, error_file: Path) -> str:
    """What a rank's exit code, and the file that it left, say of its failure."""
    if code < 0:
        name = signal.Signals(-code).name
        return f"It was ended by {name}.{USUAL_REASONS.get(name, '')}"
    if not error_file.exists():
        return f"It ended with exit code {code}; what it said stands above."
    return json.loads(error_file.read_text())["message"]["extraInfo"]["py_callstack"].rstrip()


if __name__ == "__main__":
    for number in REQUESTS_TO_STOP:  # it looks for other nodes in C, which serves no handler
        signal.signal(number, signal.SIG_DFL)
    raise SystemExit(128 + came[0] if came else main(Path(sys.argv[1]), sys.argv[2:], scratch.name))
