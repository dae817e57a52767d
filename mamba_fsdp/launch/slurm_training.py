"""Trains on the nodes of a Slurm job, from the preparation of the nodes to the decision about the
job's future.

This module runs on the cluster's own Python; host.py describes the restrictions.
"""

import contextlib
import glob
import os
import re
import shutil
import signal
import threading
import time
from typing import Callable, Iterator, List, Optional, Sequence, Set, Tuple, Type, TypeVar

from mamba_fsdp.launch import slurm
from mamba_fsdp.launch.containers import container_options, find_linked_folders
from mamba_fsdp.launch.decision import (
    EXIT_NODE_FAULT,
    EXIT_SIGKILL,
    EXIT_SIGTERM,
    EXIT_USER_ERROR,
    Action,
    JobDecision,
    JobState,
    TrainingOutcome,
    decide,
)
from mamba_fsdp.launch.host import (
    PROJECT,
    Environment,
    LaunchError,
    Variables,
    launcher_command,
    print_line,
    with_node_setup,
)
from mamba_fsdp.launch.local_training import KILLED_LAUNCHER, dry_run
from mamba_fsdp.launch.node_watch import MAX_REMOVAL_SECONDS, NodeWatch, guard_nodes
from mamba_fsdp.launch.nodes import NodePool
from mamba_fsdp.launch.plan_reader import MODULE, Plan, parse_plan, read_plan_on_host
from mamba_fsdp.launch.restart_count import NO_CHECKPOINT, RestartCount
from mamba_fsdp.launch.start_folder import StartFolder
from mamba_fsdp.launch.starts import RankRestarts
from mamba_fsdp.launch.supervisor import (
    DeadlineExceeded,
    NodeLost,
    StopRequested,
    Supervisor,
    stop_file_writer,
)
from mamba_fsdp.run.names import CACHES, WANTED_NODES_VARIABLE, newest_checkpoint
from mamba_fsdp.run.node_record import LOST, SICK, add_record, sick_nodes

PREFLIGHT_SECONDS = 900  # unpacking a large image on a node takes minutes
# How long srun waits for the other launchers after the first one has exited. Normally all launchers exit at about the
# same time.
LAUNCHER_EXIT_SECONDS = 60
MAX_ALARM_SECONDS = 10**9  # alarm accepts values below 2**31
# This long before the time limit, the job stops waiting for a checkpoint, so that it can be queued again.
DEADLINE_SECONDS = 45
# Time limit for the removal of containers after most signals, because Slurm soon ends the job.
SHORT_REMOVAL_SECONDS = 10.0
RETRY_SECONDS = 10  # interval of attempts to make data that another job is making
STEP_START_SECONDS = 60  # time limit for Slurm to start the step of the ranks

T = TypeVar("T")
Training = TypeVar("Training", bound="SlurmTraining")


class StartFailed(Exception):
    """Raised if this start of the job can't train.

    The message is empty if the reason has been printed already. code: an exit code. `decide`
    derives from it whether another start can succeed.
    """

    def __init__(self, sentence: str = "", code: int = 1) -> None:
        super().__init__(sentence)
        self.code = code


def train_in_slurm(args: List[str], variables: Variables) -> int:
    """Trains on the nodes of this job. Returns the exit code, unless Slurm queues the job again and
    ends this process.
    """
    training = make_training(args, variables, SlurmTraining)
    try:
        with training.guard_nodes():
            decision = training.run()
    except LaunchError:
        training.remove_files(is_final=True)
        raise
    lost = list(training.watch.lost)
    is_released = not lost or training.release_lost_nodes()
    if decision.action is Action.END:
        return decision.exit_code
    left_out = training.pool.left_out
    if lost and not (is_released and slurm.has_other_nodes(len(training.job.nodes), left_out)):
        print_line("waiting    until Slurm has marked {} as down".format(", ".join(lost)))
        slurm.wait_until_known(lost, training.watch.responds)
    if slurm.requeue_job(training.job, left_out):
        return decision.exit_code
    print_line("error: Slurm refused to queue the job again; sbatch the same command to resume")
    return 1


def make_training(args: List[str], variables: Variables, kind: Type[Training]) -> Training:
    """Builds an instance of `kind` for this job, and installs its signal handlers.

    kind: SlurmTraining, or its subclass for a check.

    Raises LaunchError if the job is unsuitable or has ended, or if the variables do not fit it.
    Raises SystemExit after a help page or an error in the settings.
    """
    supervisor = Supervisor()
    job = slurm.this_job()
    slurm.check_is_alive(job)
    training = kind(args, variables, job, supervisor)
    training.listen()
    slurm.check_gpus(job)
    min_nodes_to_train = max(1, variables.min_nodes)
    if variables.spare_nodes + min_nodes_to_train > len(job.nodes):
        raise LaunchError(
            f"SPARE_NODES={variables.spare_nodes}, MIN_NODES={variables.min_nodes}: the job has only {len(job.nodes)} nodes; "
            "request more: sbatch --nodes=N"
        )
    training.environment = slurm.choose_environment_of_job(variables.image)
    training.plan = read_plan_on_host(args)
    return training


class SlurmTraining:
    """Controls a training in a Slurm job. Only the first node of the job runs this program; all training nodes run ranks."""

    is_check = False  # whether the job only checks the nodes, and leaves no files in the run folder
    environment: Environment
    watch: NodeWatch

    def __init__(
        self, args: List[str], variables: Variables, job: slurm.Job, supervisor: Supervisor
    ) -> None:
        self.args = args
        self.variables = variables
        self.job = job
        self.supervisor = supervisor
        self.pool = NodePool(job.nodes, variables.spare_nodes, variables.min_nodes)
        self.container: List[str] = []
        self.plan: Optional[Plan] = None
        self.folder: Optional[StartFolder] = None
        self.has_container: Set[str] = set()  # nodes that have unpacked the image
        self.passed_preflight: Set[str] = set()  # nodes that preflight found fit
        self.ranks_per_node = 1
        self.busy_nodes: Set[str] = set()  # nodes of the current command
        self.training_nodes: List[str] = []
        self.attempts = 0  # how often the ranks have been started
        self.loss_lock = threading.Lock()
        self.restarts = RestartCount(job)
        self.newest_before = NO_CHECKPOINT
        # The run time of this start, and the time until the time limit, when USR1 requested a stop.
        self.seconds_run = float("inf")
        self.seconds_left = float("inf")

    @contextlib.contextmanager
    def guard_nodes(self) -> Iterator[None]:
        """Guards the nodes during a `with` block, and cleans up the nodes at the end of the block."""

        def seconds() -> float:
            return seconds_for_removal(self.supervisor.stop_signal, slurm.seconds_left(self.job))

        image = self.environment.image
        with guard_nodes(self.job, image, self.remove_lost_node, seconds) as self.watch:
            self.watch.remove_if_killed(self.restarts.file)
            yield

    def run(self) -> JobDecision:
        """Trains, and returns the decision about the job."""
        if self.plan and self.plan.dry_run:
            return self.dry_run(self.plan)
        job = self.job
        print_line(
            "=== {}: job {}, restart {}, on {}, in {}".format(
                time.strftime("%Y-%m-%dT%H:%M:%S%z"),
                job.name,
                job.restart,
                " ".join(job.nodes),
                self.environment,
            )
        )
        slurm.warn_if_memory_is_limited(job)
        try:
            plan, folder = self.prepare()
            if plan.dry_run:  # not known before if only the image could resolve the settings
                return self.dry_run(plan)
            state = self.train(plan, folder)
        except (StopRequested, DeadlineExceeded):
            self.supervisor.send(signal.SIGKILL)  # the command can ignore SIGTERM
            state = self.job_state(EXIT_SIGTERM)
        except StartFailed as error:
            if not self.plan:  # `prepare` failed before it counted the start
                self.count_start()
            if str(error):
                print_line(f"error: {error}")
            state = self.job_state(error.code)
        return self.conclude(state)

    # ------------------------------------------------------------------------------------------------ before training

    def prepare(self) -> Tuple[Plan, StartFolder]:
        """Prepares all nodes for the training. Returns the plan and the folder of this start.

        Starts the containers, reads the settings if only the image can, makes the folder of this
        start and the built-in data, and checks the nodes.
        """
        self.use_container(find_named_paths(self.args))
        if self.plan:
            self.count_start()
        self.retry_without_lost_nodes(self.start_containers)
        if not self.plan:
            self.plan = self.retry_without_lost_nodes(self.read_plan_in_image)
            self.count_start()
        plan = self.plan
        self.folder = StartFolder(plan.run_folder, self.job.start, bool(plan.replay))
        if plan.dry_run:
            return plan, self.folder
        self.make_folder(plan, self.folder)
        self.retry_without_lost_nodes(self.make_data)
        self.retry_without_lost_nodes(self.preflight)
        return plan, self.folder

    def retry_without_lost_nodes(self, work: Callable[[], T]) -> T:
        """Calls `work()` and returns its result. Repeats the call without the lost nodes if nodes
        are lost meanwhile.

        Raises StartFailed if too few nodes are left.
        """
        while True:
            try:
                return work()
            except NodeLost:
                # The loss has been handled. A loss after this line interrupts the next attempt.
                self.supervisor.has_lost_node = False
                self.choose_nodes()

    def choose_nodes(self) -> List[str]:
        """Returns the nodes that train next. Raises StartFailed if too few are left."""

        batch = self.plan.batch if self.plan else None
        chosen = self.pool.choose(batch, self.ranks_per_node)
        if not chosen:
            left_out = self.pool.left_out
            listed = ", ".join(f"{node} ({reason})" for node, reason in left_out.items())
            raise StartFailed(f"too few nodes are left without {listed}")
        return chosen

    def make_folder(self, plan: Plan, folder: StartFolder) -> None:
        """Makes the folder of this start, and mounts it and the paths in the settings in the
        container.
        """
        try:
            folder.make(plan.settings)
            if plan.missing_data:  # the folder must exist to be mounted
                os.makedirs(plan.missing_data, exist_ok=True)
            self.pool.suspected = sick_nodes(plan.run_folder)
        except OSError:
            self.raise_write_error(plan)
        self.watch.remove_if_killed(folder.path)
        self.use_container(self.folders_to_mount(plan))

    def count_start(self) -> None:
        """Counts this start in the job's restart count."""
        self.newest_before = self.newest()
        self.restarts.count(self.newest_before)

    def use_container(self, folders: List[str]) -> None:
        """Sets the container options of the following steps, with mounts for these folders and for
        MOUNTS.
        """
        mounted = [*self.variables.mounts, *folders]
        self.container = container_options(self.environment.image, self.job.start, mounted)

    def start_containers(self) -> None:
        """Starts the container on all nodes in parallel. Each node unpacks the image once in this
        start of the job.

        Raises StartFailed if the container starts on too few nodes.
        """
        if not self.environment.image:
            return
        nodes = [node for node in self.pool.healthy() if node not in self.has_container]
        if not nodes:
            return
        print_node = ["sh", "-c", 'echo "started: $SLURMD_NODENAME"']
        output = self.supervisor.run_for_output(self.srun_on_nodes(nodes, print_node, limited=True))
        self.has_container.update(re.findall(r"^ *\d+: started: (.*)", output, re.MULTILINE))
        missing = [node for node in nodes if node not in self.has_container]
        if not missing:
            return
        if not self.has_container:
            raise StartFailed(
                "the container did not start on any node; see above. If the image is damaged, copy it again; if the disk for "
                "unpacked images (ENROOT_DATA_PATH) is full, free space there",
                EXIT_USER_ERROR,
            )
        for node in missing:
            self.leave_out(node, SICK, "the container did not start there; see above")
        if not self.pool.has_enough_nodes():
            raise StartFailed(
                "the container did not start on {}; see above. If a node keeps failing: --exclude=NODE".format(
                    ", ".join(missing)
                )
            )

    def read_plan_in_image(self) -> Plan:
        """Resolves the settings in the container of the first node."""
        python = [self.environment.python, *MODULE, "/dev/stdout"]
        output = self.supervisor.run_for_output(self.srun_on_first_node(python + self.args))
        code = self.supervisor.last_code
        if code == EXIT_USER_ERROR:
            print_line(output.rstrip("\n"))
            raise SystemExit(code)
        if code == 0:
            return parse_plan(output)
        raise StartFailed(
            f"the settings could not be resolved on {self.job.nodes[0]}, for a reason other than their values; see above"
        )

    def folders_to_mount(self, plan: Plan) -> List[str]:
        """Returns the folders that the training needs.

        These are the folders of the paths in the settings, the targets of symbolic links in them,
        and the folder of compiled kernels.
        """
        if not self.environment.image:
            return []
        has_begun = bool(newest_checkpoint(plan.run_folder))
        # The path that initialised the run need not exist any more once the run has a checkpoint of its own.
        paths = [path for path in plan.paths if os.path.exists(path) or not has_begun]
        folders = paths + find_linked_folders(paths)
        if plan.dry_run or self.is_check:
            return folders
        caches = os.path.join(os.path.dirname(plan.run_folder), CACHES)
        with contextlib.suppress(OSError):
            os.makedirs(caches, exist_ok=True)
            folders.append(caches)
        return folders

    def raise_write_error(self, plan: Plan) -> None:
        """Raises the error of a run folder that can't be written.

        In the first start of the job this is a LaunchError, because the user has to fix it. In later
        starts it is StartFailed, because the storage can have failed temporarily.
        """
        sentence = f"can't write to {plan.run_folder} on {self.job.nodes[0]}"
        if self.job.restart == 0:
            raise LaunchError(
                f"save_ckpt_path: {sentence}; choose a folder that all nodes can write to"
            )
        raise StartFailed(sentence + ", although an earlier start of this job could")

    def make_data(self) -> None:
        """Makes the built-in data if the training needs it, or waits while another job makes it."""
        assert self.plan
        if not self.plan.missing_data:
            return
        builtin = os.path.relpath(self.plan.missing_data)
        program = os.path.join(PROJECT, "get_dataset.py")
        args = [self.environment.python, program, "builtin", builtin]
        code = self.supervisor.run(self.srun_on_first_node(args))
        while code == EXIT_USER_ERROR and is_being_made(self.plan.missing_data):
            print_line(f"waiting    for another job that is making {builtin}")
            self.supervisor.run(["sleep", str(RETRY_SECONDS)])
            code = self.supervisor.run(self.srun_on_first_node(args))
        if code != 0:
            raise StartFailed(code=code)

    def preflight(self) -> None:
        """Checks all nodes with the verb preflight, and excludes those that are not fit for
        training.

        Raises StartFailed if too few nodes are fit.
        """
        assert self.plan and self.folder
        plan = self.plan
        folder = self.folder
        nodes = self.pool.healthy()
        if self.passed_preflight.issuperset(nodes):
            return
        shutil.rmtree(folder.preflight, ignore_errors=True)
        try:
            os.mkdir(folder.preflight)
        except OSError:
            self.raise_write_error(plan)
        report = self.preflight_command("report", folder.preflight, folder.settings)
        self.supervisor.run(self.srun_on_nodes(nodes, report, limited=True))
        judge = self.preflight_command("judge", folder.preflight, *nodes)
        code = self.supervisor.run(self.srun_on_first_node(judge))
        verdict = folder.verdict()
        self.ranks_per_node = verdict["ranks_per_node"]
        suspected = self.pool.suspected
        unfit = verdict["unfit"]
        for node, reason in unfit.items():
            self.leave_out(node, SICK, reason)
        if code != 0 and (code == EXIT_USER_ERROR or not unfit):
            raise StartFailed(code=code)
        if unfit and not self.pool.has_enough_nodes():
            again = [node for node in unfit if node in suspected]
            if again:
                self.raise_still_sick(again[0])
            raise StartFailed(code=code)
        self.passed_preflight.update(self.pool.healthy())
        self.test_suspected_nodes()

    def test_suspected_nodes(self) -> None:
        """Tests the kernels on nodes that were sick in an earlier start, if the job needs these
        nodes.

        Raises StartFailed if a node is still sick.
        """
        assert self.plan and self.folder
        for node in self.choose_nodes():
            if node not in self.pool.suspected:
                continue
            test = self.preflight_command("kernels", self.plan.run_folder, self.folder.settings)
            if self.supervisor.run(self.srun_on_nodes([node], test, limited=True)) != 0:
                self.raise_still_sick(node)

    def raise_still_sick(self, node: str) -> None:
        """Raises StartFailed for a node that was sick in an earlier start and still is."""
        reason = self.pool.suspected[node]
        raise StartFailed(
            f"{node} was sick in an earlier start ({reason}), and still is; exclude it: sbatch --exclude={node} ...",
            EXIT_USER_ERROR,
        )

    def preflight_command(self, action: str, *args: str) -> List[str]:
        """Returns the command line of the verb preflight."""
        return [self.environment.python, "-m", "mamba_fsdp", "preflight", action, *args]

    def dry_run(self, plan: Plan) -> JobDecision:
        """Prints what the training would do."""
        self.use_container([path for path in self.folders_to_mount(plan) if os.path.exists(path)])
        python = self.srun_on_first_node([self.environment.python], with_network=False)
        code = dry_run(python, plan.settings, self.pool.wanted)
        return JobDecision(Action.END, code, "")

    # ------------------------------------------------------------------------------------------------ training

    def train(self, plan: Plan, folder: StartFolder) -> JobState:
        """Runs the ranks, and restarts them after failures that a restart can fix. Returns the
        final state.
        """
        with stop_file_writer(folder.stop, self.supervisor.reason) as ask:

            def run_ranks() -> int:
                return self.retry_without_lost_nodes(lambda: self.run_ranks(plan, folder, ask))

            starts = RankRestarts(run_ranks, self.job_state)
            while True:
                state = starts.run()
                node = state.outcome.node
                is_sick = state.code == EXIT_NODE_FAULT or starts.is_sick(node)
                if state.stop_signal or not is_sick or node not in self.training_nodes:
                    return state
                self.leave_out(node, SICK, state.lost)
                if not self.pool.has_enough_nodes():
                    return state

    def run_ranks(self, plan: Plan, folder: StartFolder, ask: Callable[[], None]) -> int:
        """Runs the ranks of all nodes once. Returns the exit code of srun.

        Raises NodeLost if a node is lost while the ranks run.
        """
        folder.remove_outcome()
        nodes = self.choose_nodes()
        self.print_nodes(nodes, plan)
        self.attempts += 1
        self.training_nodes = nodes
        os.environ["LAST_NODE"] = nodes[-1]
        launcher = launcher_command(
            self.environment.python, plan.run_folder, self.variables.profile, self.job.start
        )
        launcher += [
            f"--nnodes={len(nodes)}",
            "--rdzv-backend=c10d",
            "--rdzv-id=" + self.job.start,
            "--rdzv-endpoint=" + slurm.rendezvous_endpoint(self.job, nodes[0], self.attempts),
            # keep_alive_max_attempt disables torchrun's check of which nodes are alive, because it compares
            # the clocks of the nodes. NodeWatch replaces it.
            "--rdzv-conf=join_timeout=900,read_timeout=900,keep_alive_max_attempt=999999",
            *plan.rank_command("training.py", folder.settings),
        ]
        srun_limits = [
            "--kill-on-bad-exit=1",
            f"--wait={LAUNCHER_EXIT_SECONDS}",
            f"--immediate={STEP_START_SECONDS}",
        ]
        try:
            code = self.supervisor.run_training(
                self.srun_on_nodes(nodes, launcher, srun_limits), ask
            )
        except DeadlineExceeded:
            print_line(
                f"{DEADLINE_SECONDS} s before the time limit: the ranks have not stopped yet, and the job does not wait any longer"
            )
            return EXIT_SIGTERM
        if code != 0:
            self.check_for_losses()
        return code

    def print_nodes(self, nodes: Sequence[str], plan: Plan) -> None:
        """Prints the nodes that train, if they have changed or are not all nodes of the job."""
        wanted = self.pool.wanted
        is_first = not self.training_nodes
        if nodes == self.training_nodes or (is_first and len(nodes) == len(self.job.nodes)):
            return
        os.environ.pop(WANTED_NODES_VARIABLE, None)
        text = "nodes      training on " + " ".join(nodes)
        spares = [node for node in self.pool.healthy() if node not in nodes]
        if spares:
            text += "; spare: " + " ".join(spares)
        if len(nodes) < wanted:
            os.environ[WANTED_NODES_VARIABLE] = str(wanted)
            samples = plan.batch.samples_per_step(wanted, self.ranks_per_node)
            each = samples * plan.batch.ranks_per_sample // (len(nodes) * self.ranks_per_node)
            text += (
                f"; {each} samples per rank and step, {samples} in all as before; a step takes about "
                f"{wanted / len(nodes):.2f} times as long"
            )
        print_line(text)

    # ------------------------------------------------------------------------------------------------ losses

    def remove_lost_node(self, node: str) -> None:
        """Removes a lost node from the job.

        This method is called by threads of NodeWatch, or by the main thread if Slurm notices the loss
        first.
        """
        with self.loss_lock:
            if node in self.pool.left_out:
                return
            last_seen = self.watch.lost.get(node)
            if last_seen is None:
                self.watch.lost[node] = time.time()
                self.leave_out(node, LOST, "Slurm reports that it is down")
            else:
                silence = time.time() - last_seen
                self.leave_out(node, LOST, f"it has not responded for {silence:.0f} s", last_seen)
            slurm.kill_steps_on(self.job, node)
            if node in self.busy_nodes:
                self.supervisor.abort_for_lost_node()

    def release_lost_nodes(self) -> bool:
        """Gives the lost nodes back to Slurm at the end of this start, so that the job does not stay
        in the state COMPLETING because of them. Returns whether Slurm accepted that.
        """
        kept = [node for node in self.job.nodes if node not in self.watch.lost]
        return slurm.release_nodes(self.job, kept)

    def check_for_losses(self) -> None:
        """Raises NodeLost if the ranks failed because a node is lost."""
        self.watch.wait_for_confirmations()
        for node in slurm.nodes_down(self.training_nodes):
            self.remove_lost_node(node)
        if any(node in self.watch.lost for node in self.training_nodes):
            raise NodeLost

    def leave_out(self, node: str, kind: str, reason: str, last_seen: float = 0.0) -> None:
        """Excludes a node from the rest of this start, and records it in the run folder. kind: LOST
        or SICK.
        """
        self.pool.left_out[node] = reason
        print_line(f"{kind:<11}{node}: {reason}")
        if not self.is_check and self.plan and not self.plan.replay:
            with contextlib.suppress(OSError):
                last_seen = last_seen or time.time()
                add_record(self.plan.run_folder, self.job.name, node, kind, reason, last_seen)

    # ------------------------------------------------------------------------------------------------ steps

    def srun_on_nodes(
        self,
        nodes: Sequence[str],
        command: List[str],
        options: Optional[List[str]] = None,
        limited: bool = False,
    ) -> List[str]:
        """Returns the command line that runs a command once on each of these nodes, in the
        container if there is one.
        """
        self.busy_nodes = set(nodes)
        srun = (
            slurm.srun_on_nodes(nodes) + (options or []) + self.container + with_node_setup(command)
        )
        return ["timeout", str(PREFLIGHT_SECONDS), *srun] if limited else srun

    def srun_on_first_node(self, command: List[str], with_network: bool = True) -> List[str]:
        """Returns the command line that runs a command on the first node, where this program also
        runs.
        """
        self.busy_nodes = set()
        if not self.environment.image:
            return command
        inside = with_node_setup(command) if with_network else command
        return slurm.srun_without_gpus(self.job.nodes[:1]) + self.container + inside

    # ------------------------------------------------------------------------------------------------ signals

    def listen(self) -> None:
        """Handles USR1 from --signal or scancel --batch, TERM from Slurm, and INT from a keyboard."""
        self.supervisor.listen(
            {
                signal.SIGUSR1: self.stop,
                signal.SIGTERM: self.stop,
                signal.SIGINT: self.stop,
                signal.SIGALRM: self.supervisor.on_deadline,
            }
        )

    def stop(self, number: int) -> None:
        """Handles a signal: asks the current command to stop.

        After USR1, the job must be queued again before its time limit, so this method sets an alarm
        at DEADLINE_SECONDS before the limit.
        """
        if self.supervisor.stop_signal:
            return
        print_line(
            "{}: stopping after the current step and a checkpoint (immediately if no step has begun)".format(
                signal.Signals(number).name[len("SIG") :]
            )
        )
        self.supervisor.request_stop(number)
        if number == signal.SIGUSR1:  # other signals announce that Slurm itself ends the job
            self.seconds_run = slurm.seconds_run(self.job)
            seconds_left = slurm.seconds_left(self.job)
            if seconds_left is not None:
                self.seconds_left = seconds_left
                seconds = max(1, int(seconds_left - DEADLINE_SECONDS))
                signal.alarm(min(seconds, MAX_ALARM_SECONDS))

    # ------------------------------------------------------------------------------------------------ at the end

    def newest(self) -> str:
        """Returns the newest checkpoint of the run.

        If the run folder is not known yet, this is the newest checkpoint at the previous start of
        the job.
        """
        if not self.plan:
            return self.restarts.newest
        return newest_checkpoint(self.plan.run_folder) or NO_CHECKPOINT

    def job_state(self, code: int) -> JobState:
        """Returns the state of the job after the training has ended with this exit code of srun."""
        stop_signal = self.supervisor.stop_signal
        outcome = self.folder.outcome() if self.folder else TrainingOutcome()
        return JobState(
            code=outcome.code if outcome.status else code,
            outcome=outcome,
            run_folder=self.plan.user_folder() if self.plan else "",
            newest=self.newest(),
            newest_before=self.newest_before,
            restarts=self.restarts.restarts,
            max_restarts=self.variables.max_restarts,
            stop_signal=stop_signal,
            is_running=not stop_signal or slurm.query_state(self.job) == "RUNNING",
            seconds_run=self.seconds_run,
            seconds_left=self.seconds_left,
        )

    def conclude(self, state: JobState) -> JobDecision:
        """Decides what happens to the job, and prints it. Later signals do not change the decision."""
        decision = decide(state)
        for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT, signal.SIGALRM):
            signal.signal(number, signal.SIG_IGN)
        self.remove_files(is_final=decision.action is Action.END)
        print_line(decision.sentence)
        if decision.prints_error:
            self.show_first_error(state)
        return decision

    def remove_files(self, is_final: bool) -> None:
        """Removes the folder of this start, and the restart count if the job will not start again."""
        if is_final:
            self.restarts.forget()
        if self.folder:
            self.folder.remove()

    def show_first_error(self, state: JobState) -> None:
        """Prints the first error of all nodes at the end of the log, where users look first.

        If a node was lost, that is the first error, because other nodes fail as a consequence.
        """
        lost = [node for node in self.training_nodes if node in self.watch.lost]
        if lost:
            print_line("error: lost " + ", ".join(lost))
        elif state.outcome.error:
            print_line(state.outcome.error.rstrip("\n"))
        elif state.code == EXIT_SIGKILL and self.folder:
            print_line(KILLED_LAUNCHER)


def is_being_made(data: str) -> bool:
    """Returns whether a process of another job is making the token store `data`.

    Call this only when no process of this job makes the store, because its lease would count too.
    """
    return bool(glob.glob(os.path.join(glob.escape(data), ".progress*", "*.lease")))


def find_named_paths(args: Sequence[str]) -> List[str]:
    """Returns the paths in the arguments that must be mounted to read the settings.

    These are, for example, the paths in --config=/elsewhere/my.yaml and `replay RUN`.
    """
    paths = []
    for word in args:
        path = word.partition("=")[2]
        if not word.startswith("-"):
            path = os.path.abspath(word)
        if os.path.isabs(path) and os.path.exists(path):
            paths.append(path)
    return paths


def seconds_for_removal(stop_signal: str, seconds_left: Optional[float]) -> float:
    """Returns how long a job waits for the removal of its containers.

    stop_signal: the signal that ended the job, or "". seconds_left: the time until the time limit;
    None if it is not known.
    """
    if not stop_signal:
        return MAX_REMOVAL_SECONDS
    if stop_signal != "USR1" or seconds_left is None:
        return SHORT_REMOVAL_SECONDS
    return max(SHORT_REMOVAL_SECONDS, seconds_left - DEADLINE_SECONDS)
