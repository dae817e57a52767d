"""One node's share of a run: torchrun's agent with a rank for each GPU.

    python -m mamba_fsdp.launch.node RUN_FOLDER [torchrun options] training.py [--SETTING=VALUE ...]

When a rank fails, the others fail for its sake soon after, and the log is full of their errors. So
each node leaves its first failure in RUN_FOLDER/failures/ID (ID is torchrun's --rdzv-id). The file
`outcome` beside them is what 1.train.sbatch reads: a line `STATUS EXIT_CODE`, and then the first
failure of all nodes. On one machine (--standalone) that failure is printed instead.
"""

import json
import logging
import os
import signal
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch.distributed import run as torchrun
from torch.distributed.elastic.agent.server import RunResult, WorkerGroup, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import RendezvousParameters, api, registry
from torch.distributed.launcher.api import LaunchConfig

from mamba_fsdp.errors import StorageError, UserError
from mamba_fsdp.launch.failures import Failure, first_failure, order
from mamba_fsdp.launch.machine import (
    end_with_launcher,
    node_name,
    processes_per_node,
    set_environment,
)
from mamba_fsdp.parallel.compat import agent_logs
from mamba_fsdp.parallel.world import allow_many_files
from mamba_fsdp.report.records import correct_status
from mamba_fsdp.run_layout import CHECKPOINTS, FAILURES, STOP, committed
from mamba_fsdp.storage import write_atomically

# Slurm ends the job with the first node that exits: the others shall leave their failures before.
SECONDS_FOR_OTHERS = 3
NO_LIMIT = 1_000_000  # of restarts; Agent.may_restart has one
RUNNING, WELL = None, 0  # see end_of
FURTHER_REQUESTS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)


def main(run: Path, words: list[str]) -> int:
    """Runs this node's ranks to their end. Returns the exit code of the rank that failed first."""
    end_with_launcher(signal.SIGQUIT)
    logging.disable(logging.ERROR)  # torch's own account of a failure: ours says more, at the end
    allow_many_files()
    options = torchrun.parse_args(
        [f"--nproc-per-node={processes_per_node()}", "--rdzv-backend=c10d", *words]
    )
    if options.standalone:
        options.rdzv_endpoint = "localhost:0"
    # 1.train.sbatch removes a folder of this name when this process was killed.
    with tempfile.TemporaryDirectory(prefix=f"mamba-train-{os.getpid()}-") as scratch:
        set_environment(run, Path(scratch), options.rdzv_endpoint.rpartition(":")[0])
        failures = Path(scratch if options.standalone else run, FAILURES, options.rdzv_id)
        options.log_dir = scratch
        config, command, arguments = torchrun.config_from_args(options)
        agent = Agent(config, command, arguments, run, failures)
        return conclude(agent, run_ranks(agent), options.standalone)


class Agent(LocalElasticAgent):
    """torchrun's agent: it meets those of other nodes, numbers the ranks, starts and restarts them.

    It differs from torchrun's in what it does to ranks that are to end. Beside one that failed they
    are killed at once: they can only wait for it. After a request to stop they have as long as Slurm
    gives them, be they in the middle of a checkpoint; torchrun's have 30 s.
    """

    def __init__(
        self, config: LaunchConfig, command: str, arguments: list[str], run: Path, failures: Path
    ) -> None:
        meeting = RendezvousParameters(
            config.rdzv_backend,
            config.rdzv_endpoint,
            config.run_id,
            config.min_nodes,
            config.max_nodes,
            **config.rdzv_configs,
        )
        self.nodes = registry.get_rendezvous_handler(meeting)
        spec = WorkerSpec(
            role="rank",
            local_world_size=config.nproc_per_node,
            rdzv_handler=self.nodes,
            entrypoint=command,
            args=tuple(arguments),
            max_restarts=NO_LIMIT,
            monitor_interval=0.1,
        )
        super().__init__(spec, **agent_logs(config))
        self.run_folder = run
        self.failures = failures
        # False where Slurm starts the step again, for a node that went: others failed for its sake.
        self.has_started = False
        self.failure: Failure | None = None  # the last one of this node
        self.restarted_from: list[Path] | None = None  # the checkpoints at the last restart

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        failure = first_failure(self.failures)
        if failure and worker_group.group_rank == 0:
            lost = failure.loss() if self.has_started else "a node"
            print(f"restarts   the ranks after the loss of {lost}", flush=True)
            for path in self.failures.iterdir():
                path.unlink()
        self.has_started = True
        return super()._start_workers(worker_group)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        failed = [
            worker.global_rank
            for worker in worker_group.workers
            if end_of(worker.id) not in (RUNNING, WELL)
        ]
        if failed:
            self.tell_ranks(signal.SIGKILL)
        result = super()._monitor_workers(worker_group)
        if not failed:
            failed = list(result.failures)  # of a rank that ended since
        if failed:
            found = [Failure.of_rank(rank, result.failures[rank]) for rank in failed]
            first = min(found, key=order)
            self.record(first)
            if not self.may_restart(first):
                raise ChildFailedError("training", result.failures)
        return result

    def record(self, failure: Failure) -> None:
        """Leaves this node's failure for all nodes to see."""
        self.failure = failure
        leave(self.failures, f"{failure.node}.json", json.dumps(asdict(failure)))

    def may_restart(self, failure: Failure) -> bool:
        """Whether ranks start again in place: once for each new checkpoint, and not after a mistake
        or a request to stop.

        What this does not mend, another start of the job may: 1.train.sbatch sees to that.
        """
        is_mistake = failure.exit_code == UserError.exit_code
        if is_mistake or os.environ.get("MAX_RESTARTS") == "0" or self.is_stop_asked():
            return False
        checkpoints = committed(self.run_folder / CHECKPOINTS)
        is_new = checkpoints != self.restarted_from
        self.restarted_from = checkpoints
        return is_new

    def is_stop_asked(self) -> bool:
        """Whether the file STOP is there; 1.train.sbatch has removed one that was for an earlier run."""
        return os.path.exists(self.run_folder / STOP)

    def _stop_workers(self, *_: Any, **__: Any) -> None:
        super()._shutdown(signal.SIGKILL)

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, *_: Any, **__: Any) -> None:
        if death_sig == signal.SIGQUIT:  # from those who don't want to wait
            super()._shutdown(signal.SIGKILL)
            return
        for number in FURTHER_REQUESTS:
            signal.signal(number, signal.SIG_IGN)
        signal.signal(signal.SIGQUIT, lambda *_: self.tell_ranks(signal.SIGKILL))
        self.tell_ranks(death_sig)
        for pid in self.ranks_that_run():
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        super()._shutdown(death_sig)

    def ranks_that_run(self) -> list[int]:
        """The process ids of this node's ranks that have not ended."""
        pids = [worker.id for worker in self.get_worker_group().workers if worker.id]
        return [pid for pid in pids if end_of(pid) is RUNNING]

    def tell_ranks(self, number: signal.Signals) -> None:
        """Sends a signal to the ranks that run, and to what they have started."""
        for pid in self.ranks_that_run():
            os.killpg(pid, number)


def run_ranks(agent: Agent) -> int:
    """The exit code of this node's ranks; what made them fail is on record."""
    # torch has handlers for other requests, and for these only once it has started ranks.
    signal.signal(signal.SIGUSR1, _stop)
    signal.signal(signal.SIGQUIT, _stop)
    try:
        result = agent.run()
    except (ChildFailedError, StorageError, api.RendezvousClosedError):
        return 1  # ranks have failed, met that storage too, or are another node's that has given up
    except SignalException as request:
        raise SystemExit(128 + request.sigval) from None
    except api.RendezvousError as error:
        said = (
            f"error: {node_name()} could not meet the other nodes: {error} ({error.__cause__}); can it "
            "reach the first node by its name, and does the firewall or security group let the "
            "nodes connect?"
        )
        agent.record(Failure(node_name(), None, 1, False, time.time(), said))
        return 1
    finally:
        agent.nodes.shutdown()
    return 0 if result else 1  # None: the other nodes go on without this one


def conclude(agent: Agent, code: int, alone: bool) -> int:
    """Tells the first failure of all nodes, see above. Returns the exit code of its rank."""
    if code and not alone:
        time.sleep(SECONDS_FOR_OTHERS)
    failure = None
    if code:
        failure = first_failure(agent.failures) or agent.failure
    # A rank that was killed has left the status `running`.
    status = correct_status(agent.run_folder).get("status", "unknown")
    if code and agent.is_stop_asked():
        status = "stopped"
    text = ""
    if failure:
        code = failure.exit_code
        text = failure.text()
    group = agent.get_worker_group()
    if not alone and (code or group.group_rank == 0):
        is_told = leave(agent.failures, "outcome", f"{status} {code}\n{text}")
    else:  # a rank that is alone has said it right above
        is_told = not failure or (len(group.workers) == 1 and not failure.killed)
    if not is_told:
        print(text, end="", file=sys.stderr, flush=True)
    return code


def leave(folder: Path, name: str, text: str) -> bool:
    """Writes a file for all nodes to see. Returns False where that can't be."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / name, text)
    except (OSError, UserError):
        return False
    return True


def end_of(pid: int) -> int | None:
    """How a child has ended: RUNNING, WELL, or another number. torch's agent, which asks for the
    same later, still learns it."""
    try:
        ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:  # the agent has asked before; it does so again only for others
        return WELL
    return ended.si_status if ended else RUNNING


def _stop(number, _frame):
    raise SignalException("a request to stop", signal.Signals(number))


if __name__ == "__main__":
    raise SystemExit(main(Path(os.path.abspath(sys.argv[1])), sys.argv[2:]))
