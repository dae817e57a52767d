"""A training on the nodes of a Slurm job, from its first line to what becomes of the job. For the cluster's own
Python, see host.py."""

import contextlib
import glob
import os
import re
import shutil
import signal
import sys
import threading
import time
from typing import Callable, Iterator, List, Optional, Sequence, Set, Tuple, Type, TypeVar

from mamba_fsdp.launch import slurm
from mamba_fsdp.launch.containers import container_options, folders_behind_links
from mamba_fsdp.launch.decision import (
    ENDED,
    KILLED,
    MISTAKE,
    NODE_FAULT,
    Action,
    Decision,
    Ending,
    Outcome,
    decide,
)
from mamba_fsdp.launch.guard_step import MAX_REMOVAL_SECONDS, guarded
from mamba_fsdp.launch.host import (
    PROJECT,
    Environment,
    Mistake,
    Variables,
    choose_environment,
    say,
)
from mamba_fsdp.launch.local_training import KILLED_LAUNCHER, dry_run
from mamba_fsdp.launch.node_command import launcher_of, on_node
from mamba_fsdp.launch.node_watch import NodeWatch
from mamba_fsdp.launch.nodes import NodePool, can_share
from mamba_fsdp.launch.plan_reader import MODULE, Plan, parse_answer, read_plan_on_host
from mamba_fsdp.launch.restart_count import NO_CHECKPOINT, RestartCount
from mamba_fsdp.launch.start_folder import StartFolder
from mamba_fsdp.launch.starts import Starts
from mamba_fsdp.launch.supervisor import NodeLost, StopAsked, Supervisor, TooLate, written_until
from mamba_fsdp.run.names import CACHES, WANTED_NODES_VARIABLE, newest_checkpoint
from mamba_fsdp.run.node_record import LOST, SICK, add_record, sick_nodes

PREFLIGHT_SECONDS = 900  # the first start of a large image on a node takes minutes
SECONDS_BEHIND = 60  # launchers end together; one that is missing for so long never ends
MAX_ALARM_SECONDS = 10**9  # alarm takes no more than 2**31
LAST_SECONDS = 45  # so close to the time limit, the job does not wait for a checkpoint any longer
SHORT_REMOVAL_SECONDS = 10.0  # of containers, after signals at which Slurm does not wait for long
SECONDS_BETWEEN_TRIES = 10  # to make data that another job is making
SECONDS_FOR_STEP = 60  # for Slurm to start a step of the ranks

T = TypeVar("T")
Training = TypeVar("Training", bound="SlurmTraining")


class GiveUp(Exception):
    """This start of the job can't train. The message says why, if that has not been said; code: the exit code by which
    `decide` tells whether another start may succeed."""

    def __init__(self, sentence: str = "", code: int = 1) -> None:
        super().__init__(sentence)
        self.code = code


def train_in_slurm(words: List[str], variables: Variables) -> int:
    """Trains on the nodes of this job. Returns the exit code, unless Slurm queues the job again and ends it."""
    training = make_training(words, variables, SlurmTraining)
    try:
        with training.guarded():
            decision = training.run()
    except Mistake:
        training.forget()
        raise
    if decision.action is Action.END:
        return decision.exit_code
    left_out = training.pool.left_out
    lost = list(training.watch.lost)
    if lost and not slurm.has_other_nodes(len(training.job.nodes), left_out):
        say("waiting    until Slurm knows that {} is down".format(", ".join(lost)))
        slurm.await_down(lost)
    if slurm.queue_again(training.job, left_out):
        return decision.exit_code
    say("error: Slurm refused to queue the job again; sbatch the same command to resume")
    return 1


def make_training(words: List[str], variables: Variables, kind: Type[Training]) -> Training:
    """Returns the training of this job, or a check, as `kind` says. Signals are handled from here on. Raises Mistake, or
    SystemExit after a help page or a mistake in the settings."""
    supervisor = Supervisor()
    job = slurm.this_job()
    training = kind(words, variables, job, supervisor)
    training.listen()
    slurm.check_gpus(job)
    least = max(1, variables.min_nodes)
    if variables.spare_nodes + least > len(job.nodes):
        raise Mistake(
            f"SPARE_NODES={variables.spare_nodes}, MIN_NODES={variables.min_nodes}: the job has {len(job.nodes)} nodes; "
            "ask for more: sbatch --nodes=N"
        )
    training.environment = choose_environment(variables.image)
    if training.environment.image:
        slurm.check_images_run(training.environment.image)
        os.environ["IMAGE"] = training.environment.image  # for what a step says of itself
    answer = read_plan_on_host(words)
    if answer and not answer.plan:
        sys.exit(answer.code)
    if answer:
        training.plan = answer.plan
    return training


class SlurmTraining:
    """A training under way in a job, on its first node."""

    keeps_record = True  # of lost and sick nodes, in the run folder
    environment: Environment
    watch: NodeWatch

    def __init__(
        self, words: List[str], variables: Variables, job: slurm.Job, supervisor: Supervisor
    ) -> None:
        self.words = words
        self.variables = variables
        self.job = job
        self.supervisor = supervisor
        self.pool = NodePool(job.nodes, variables.spare_nodes, variables.min_nodes)
        self.container: List[str] = []
        self.plan: Optional[Plan] = None
        self.folder: Optional[StartFolder] = None
        self.has_container: Set[str] = set()  # nodes
        self.passed_preflight: Set[str] = set()
        self.ranks_per_node = 1
        self.busy: Set[str] = set()  # the nodes of the command that runs now
        self.training_nodes: List[str] = []
        self.attempts = 0  # at running the ranks
        self.losing = threading.Lock()
        self.restarts = RestartCount(job)
        self.newest_before = NO_CHECKPOINT
        self.seconds_run = float("inf")  # and left, of this start, when it was asked to stop
        self.seconds_left = float("inf")

    @contextlib.contextmanager
    def guarded(self) -> Iterator[None]:
        """Watches the nodes during the block, and cleans them up at its end."""
        image = self.environment.image
        with guarded(self.job, image, self.lose_node, self.seconds_for_removal) as self.watch:
            self.watch.remove_if_killed(self.restarts.file)
            yield

    def run(self) -> Decision:
        """Trains, and decides what becomes of the job."""
        if self.plan and self.plan.dry_run:
            return self.dry_run(self.plan)
        job = self.job
        say(
            "=== {}: job {}, restart {}, on {}, in {}".format(
                time.strftime("%Y-%m-%dT%H:%M:%S%z"),
                job.name,
                job.restart,
                " ".join(job.nodes),
                self.environment,
            )
        )
        slurm.warn_of_little_memory(job)
        try:
            plan, folder = self.prepare()
            if plan.dry_run:  # read in the image
                return self.dry_run(plan)
            ending = self.train(plan, folder)
        except (StopAsked, TooLate):
            self.supervisor.send(signal.SIGKILL)  # to a command that heeds no SIGTERM
            ending = self.ending(ENDED)
        except GiveUp as trouble:
            if not self.plan:  # it is not known yet where the checkpoints lie
                self.count_start()
            if str(trouble):
                say(f"error: {trouble}")
            ending = self.ending(trouble.code)
        return self.conclude(ending)

    # ------------------------------------------------------------------------------------------------ before training

    def prepare(self) -> Tuple[Plan, StartFolder]:
        """Prepares all nodes: starts the containers, reads the settings if only the image can, makes the start's folder
        and the built-in data, and checks the nodes. Returns the plan and the folder."""
        self.use_container(named_paths(self.words))
        if self.plan:
            self.count_start()
        self.without_lost_nodes(self.start_containers)
        if not self.plan:
            self.plan = self.without_lost_nodes(self.read_plan_in_image)
            self.count_start()
        plan = self.plan
        self.folder = StartFolder(plan.run_folder, self.job.start, bool(plan.replay))
        if plan.dry_run:
            return plan, self.folder
        self.make_folder(plan, self.folder)
        self.without_lost_nodes(self.make_data)
        self.without_lost_nodes(self.preflight)
        return plan, self.folder

    def without_lost_nodes(self, work: Callable[[], T]) -> T:
        """Returns the result of `work()`, which is repeated if a node is lost meanwhile. Raises GiveUp if the nodes that
        are left are too few."""
        while True:
            try:
                return work()
            except NodeLost:
                # A loss from here on ends the next attempt; those before it are left out already.
                self.supervisor.has_lost_node = False
                self.choose_nodes()

    def choose_nodes(self) -> List[str]:
        """Returns the nodes that are to train. Raises GiveUp if too few are left."""

        def fits(nodes: int) -> bool:
            if not self.plan:
                return True
            return can_share(self.plan.batch, self.pool.wanted, self.ranks_per_node, nodes)

        chosen = self.pool.choose(fits)
        if not chosen:
            left_out = self.pool.left_out
            listed = ", ".join(f"{node} ({reason})" for node, reason in left_out.items())
            raise GiveUp(f"too few nodes are left without {listed}")
        return chosen

    def make_folder(self, plan: Plan, folder: StartFolder) -> None:
        """Makes the folder of this start, and mounts it with what the settings name."""
        try:
            folder.make(plan.settings)
            if plan.missing_data:  # to be mounted
                os.makedirs(plan.missing_data, exist_ok=True)
            self.pool.suspected = sick_nodes(plan.run_folder)
        except OSError:
            self.fail_to_write(plan)
        self.watch.remove_if_killed(folder.path)
        self.use_container(self.folders_of(plan))

    def count_start(self) -> None:
        """Counts this start of the job among those from the same checkpoint."""
        self.newest_before = self.newest()
        self.restarts.count(self.newest_before)

    def use_container(self, folders: List[str]) -> None:
        """From here on steps run in a container in which these folders are mounted too."""
        mounted = [*self.variables.mounts, *folders]
        self.container = container_options(self.environment.image, self.job.start, mounted)

    def start_containers(self) -> None:
        """Starts the container on all nodes at once: each unpacks the image the only time in this start of the job.
        Raises GiveUp if too few nodes can."""
        if not self.environment.image:
            return
        nodes = [node for node in self.pool.healthy() if node not in self.has_container]
        if not nodes:
            return
        say_node = ["sh", "-c", 'echo "started: $SLURMD_NODENAME"']
        output = self.supervisor.output_of(self.on_nodes(nodes, say_node, limited=True))
        self.has_container.update(re.findall(r"^ *\d+: started: (.*)", output, re.MULTILINE))
        missing = [node for node in nodes if node not in self.has_container]
        if not missing:
            return
        if not self.has_container:
            raise GiveUp(
                "the container started on no node; see above. If the image is damaged, copy it again; if the disk is full "
                "to which Enroot unpacks (ENROOT_DATA_PATH), make room there",
                MISTAKE,
            )
        for node in missing:
            self.leave_out(node, SICK, "the container did not start there; see above")
        if not self.pool.has_enough():
            raise GiveUp(
                "the container did not start on {}; see above. If a node keeps failing: --exclude=NODE".format(
                    ", ".join(missing)
                )
            )

    def read_plan_in_image(self) -> Plan:
        """Returns what the settings mean, as the image on the first node finds out."""
        python = [self.environment.python, *MODULE, "/dev/stdout"]
        output = self.supervisor.output_of(self.on_first_node(python + self.words))
        answer = parse_answer(self.supervisor.last_code, output)
        if answer.plan:
            return answer.plan
        if answer.code in (0, MISTAKE):  # a help page, or a mistake
            say(output.rstrip("\n"))
            raise SystemExit(answer.code)
        raise GiveUp(
            f"the settings could not be read on {self.job.nodes[0]}, though no mistake in them was found; see above"
        )

    def folders_of(self, plan: Plan) -> List[str]:
        """Returns the folders that the training needs: those that settings name, where their links lead, and
        where compiled kernels are kept."""
        if not self.environment.image:
            return []
        has_begun = bool(newest_checkpoint(plan.run_folder))
        # What a run began with may be gone: its own checkpoint wins.
        paths = [path for path in plan.paths if os.path.exists(path) or not has_begun]
        folders = paths + folders_behind_links(paths)
        if plan.dry_run:
            return folders
        caches = os.path.join(os.path.dirname(plan.run_folder), CACHES)
        with contextlib.suppress(OSError):
            os.makedirs(caches, exist_ok=True)
            folders.append(caches)
        return folders

    def fail_to_write(self, plan: Plan) -> None:
        """Raises the error of a run folder that can't be written: at first a user's mistake, later trouble of the
        storage that may pass."""
        sentence = f"can't write to {plan.run_folder} on {self.job.nodes[0]}"
        if self.job.restart == 0:
            raise Mistake("save_ckpt_path: " + sentence)
        raise GiveUp(sentence + ", as an earlier start of this job could")

    def make_data(self) -> None:
        """Makes the built-in data if the training needs it, or waits while another job makes it."""
        assert self.plan
        if not self.plan.missing_data:
            return
        builtin = os.path.relpath(self.plan.missing_data)
        program = os.path.join(PROJECT, "get_dataset.py")
        words = [self.environment.python, program, "builtin", builtin]
        code = self.supervisor.run(self.on_first_node(words))
        while code == MISTAKE and is_being_made(self.plan.missing_data):
            say(f"waiting    for another job, which is making {builtin}")
            self.supervisor.run(["sleep", str(SECONDS_BETWEEN_TRIES)])
            code = self.supervisor.run(self.on_first_node(words))
        if code != 0:
            raise GiveUp(code=code)

    def preflight(self) -> None:
        """Has every node report what it finds for these settings. Nodes that are not fit are left out. Raises GiveUp if
        too few are fit."""
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
            self.fail_to_write(plan)
        report = self.preflight_command("report", folder.preflight, folder.settings)
        self.supervisor.run(self.on_nodes(nodes, report, limited=True))
        judge = self.preflight_command("judge", folder.preflight, *nodes)
        code = self.supervisor.run(self.on_first_node(judge))
        verdict = folder.verdict()
        self.ranks_per_node = verdict["ranks_per_node"]
        suspected = self.pool.suspected
        unfit = verdict["unfit"]
        for node, reason in unfit.items():
            self.leave_out(node, SICK, reason)
        if code != 0 and (code == MISTAKE or not unfit):
            raise GiveUp(code=code)
        if unfit and not self.pool.has_enough():
            again = [node for node in unfit if node in suspected]
            if again:
                self.blame(again[0])
            raise GiveUp(code=code)
        self.passed_preflight.update(self.pool.healthy())
        self.test_suspected_nodes()

    def test_suspected_nodes(self) -> None:
        """Tests the kernels on nodes that were sick in an earlier start, if the job can't do without them. Raises GiveUp
        if a node is still sick."""
        assert self.plan and self.folder
        for node in self.choose_nodes():
            if node not in self.pool.suspected:
                continue
            test = self.preflight_command("kernels", self.plan.run_folder, self.folder.settings)
            if self.supervisor.run(self.on_nodes([node], test, limited=True)) != 0:
                self.blame(node)

    def blame(self, node: str) -> None:
        """Raises the error of a node that was sick in an earlier start and still is."""
        reason = self.pool.suspected[node]
        raise GiveUp(
            f"{node} was sick in an earlier start ({reason}), and still is; sbatch --exclude={node} ...",
            MISTAKE,
        )

    def preflight_command(self, action: str, *words: str) -> List[str]:
        """Returns the command of the verb preflight."""
        return [self.environment.python, "-m", "mamba_fsdp", "preflight", action, *words]

    def dry_run(self, plan: Plan) -> Decision:
        """Says what would be trained."""
        self.use_container([path for path in self.folders_of(plan) if os.path.exists(path)])
        python = self.on_first_node([self.environment.python], with_network=False)
        code = dry_run(python, plan.settings, self.pool.wanted)
        return Decision(Action.END, code, "")

    # ------------------------------------------------------------------------------------------------ training

    def train(self, plan: Plan, folder: StartFolder) -> Ending:
        """Runs the ranks, and again after losses that a restart can fix. Returns how that ended."""
        with written_until(folder.stop, self.supervisor.reason) as ask:

            def run_ranks() -> int:
                return self.without_lost_nodes(lambda: self.run_ranks(plan, folder, ask))

            starts = Starts(run_ranks, self.ending)
            while True:
                ending = starts.run()
                node = ending.outcome.node
                is_sick = ending.code == NODE_FAULT or starts.is_sick(node)
                if ending.asked or not is_sick or node not in self.training_nodes:
                    return ending
                self.leave_out(node, SICK, ending.lost)
                if not self.pool.has_enough():
                    return ending

    def run_ranks(self, plan: Plan, folder: StartFolder, ask: Callable[[], None]) -> int:
        """Runs the ranks of all nodes once. Returns srun's exit code. Raises NodeLost if a node is lost meanwhile."""
        folder.forget_failures()
        nodes = self.choose_nodes()
        self.say_nodes(nodes, plan)
        self.attempts += 1
        self.training_nodes = nodes
        os.environ["LAST_NODE"] = nodes[-1]
        launcher = launcher_of(
            self.environment.python, plan.run_folder, self.variables.profile, self.job.start
        )
        launcher += [
            f"--nnodes={len(nodes)}",
            "--rdzv-backend=c10d",
            "--rdzv-id=" + self.job.start,
            "--rdzv-endpoint=" + slurm.meeting_place(self.job, nodes[0], self.attempts),
            # keep_alive_max_attempt: torchrun judges by the nodes' clocks which of them are alive; NodeWatch does not.
            "--rdzv-conf=join_timeout=900,read_timeout=900,keep_alive_max_attempt=999999",
            *plan.program("training.py", folder.settings),
        ]
        bounds = [
            "--kill-on-bad-exit=1",
            f"--wait={SECONDS_BEHIND}",
            f"--immediate={SECONDS_FOR_STEP}",
        ]
        try:
            code = self.supervisor.run_training(self.on_nodes(nodes, launcher, bounds), ask)
        except TooLate:
            say(
                f"{LAST_SECONDS} s before the time limit: the training has not ended, and the job does not wait for it"
            )
            return ENDED
        if code != 0:
            self.notice_losses()
        return code

    def say_nodes(self, nodes: Sequence[str], plan: Plan) -> None:
        """Says which nodes train, if they are not the same as before or not all."""
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
            samples = plan.batch.of_nodes(wanted, self.ranks_per_node)
            each = samples * plan.batch.ranks_per_sample // (len(nodes) * self.ranks_per_node)
            text += (
                f"; {each} samples a rank and step, {samples} together as before, in about {wanted / len(nodes):.2f} times "
                "as long"
            )
        say(text)

    # ------------------------------------------------------------------------------------------------ losses

    def lose_node(self, node: str) -> None:
        """Takes a lost node out of the job. Threads of NodeWatch call it, and this one if Slurm has noticed the loss first."""
        with self.losing:
            if node in self.pool.left_out:
                return
            last_seen = self.watch.lost.get(node)
            if last_seen is None:
                self.watch.lost[node] = time.time()
                self.leave_out(node, LOST, "it is down, as Slurm says")
            else:
                silence = time.time() - last_seen
                self.leave_out(node, LOST, f"it has not answered for {silence:.0f} s", last_seen)
            kept = [name for name in self.job.nodes if name not in self.watch.lost]
            slurm.kill_steps_on(self.job, node)
            slurm.release_nodes(self.job, kept)
            if node in self.busy:
                self.supervisor.lose_node()

    def notice_losses(self) -> None:
        """Raises NodeLost if the ranks have failed because of a node that is lost."""
        self.watch.settle()
        for node in slurm.nodes_down(self.training_nodes):
            self.lose_node(node)
        if any(node in self.watch.lost for node in self.training_nodes):
            raise NodeLost

    def leave_out(self, node: str, kind: str, reason: str, last_seen: float = 0.0) -> None:
        """Leaves a node out from here on, and records it in the run folder."""
        self.pool.left_out[node] = reason
        say(f"{kind:<11}{node}: {reason}")
        if self.keeps_record and self.plan and not self.plan.replay:
            with contextlib.suppress(OSError):
                last_seen = last_seen or time.time()
                add_record(self.plan.run_folder, self.job.name, node, kind, reason, last_seen)

    # ------------------------------------------------------------------------------------------------ steps

    def on_nodes(
        self,
        nodes: Sequence[str],
        command: List[str],
        options: Optional[List[str]] = None,
        limited: bool = False,
    ) -> List[str]:
        """Returns what runs a command once on each of these nodes, inside the container if there is one."""
        self.busy = set(nodes)
        srun = slurm.on_nodes(nodes) + (options or []) + self.container + on_node(command)
        return ["timeout", str(PREFLIGHT_SECONDS), *srun] if limited else srun

    def on_first_node(self, command: List[str], with_network: bool = True) -> List[str]:
        """Returns what runs a command on the first node, where this program is already."""
        self.busy = set()
        if not self.environment.image:
            return command
        inside = on_node(command) if with_network else command
        return slurm.on_hosts(self.job.nodes[:1]) + self.container + inside

    # ------------------------------------------------------------------------------------------------ signals

    def listen(self) -> None:
        """Takes USR1 from --signal or scancel --batch, TERM from Slurm, and INT from a keyboard."""
        self.supervisor.listen(
            {
                signal.SIGUSR1: self.stop,
                signal.SIGTERM: self.stop,
                signal.SIGINT: self.stop,
                signal.SIGALRM: self.supervisor.give_up_waiting,
            }
        )

    def stop(self, number: int) -> None:
        """Asks what runs now to stop; after USR1 the job must be queued again before its time limit."""
        if self.supervisor.asked:
            return
        say(
            "{}: stopping once the ranks, which look each second, have ended a step and written a checkpoint, or before "
            "the first".format(signal.Signals(number).name[len("SIG") :])
        )
        self.supervisor.ask_to_stop(number)
        if number == signal.SIGUSR1:  # before the end that TERM announces, Slurm itself sees to it
            self.seconds_run = slurm.seconds_run(self.job)
            left = slurm.seconds_left(self.job)
            if left is not None:
                self.seconds_left = left
                seconds = max(1, int(left - LAST_SECONDS))
                signal.alarm(min(seconds, MAX_ALARM_SECONDS))

    # ------------------------------------------------------------------------------------------------ at the end

    def newest(self) -> str:
        """Returns the newest checkpoint of the run; if its folder is not known yet, that of the job's start before."""
        if not self.plan:
            return self.restarts.newest
        return newest_checkpoint(self.plan.run_folder) or NO_CHECKPOINT

    def ending(self, code: int) -> Ending:
        """Returns what is known now that the training has ended with this exit code of srun."""
        asked = self.supervisor.asked
        outcome = self.folder.outcome() if self.folder else Outcome()
        return Ending(
            code=outcome.code if outcome.status else code,
            outcome=outcome,
            run_folder=self.plan.shown_folder() if self.plan else "",
            newest=self.newest(),
            newest_before=self.newest_before,
            restarts=self.restarts.restarts,
            max_restarts=self.variables.max_restarts,
            asked=asked,
            is_running=not asked or slurm.state(self.job) == "RUNNING",
            seconds_run=self.seconds_run,
            seconds_left=self.seconds_left,
        )

    def conclude(self, ending: Ending) -> Decision:
        """Decides what becomes of the job, and says it. From here on no signal changes that."""
        decision = decide(ending)
        for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT, signal.SIGALRM):
            signal.signal(number, signal.SIG_IGN)
        if decision.forgets:
            self.restarts.forget()
        if self.folder:
            self.folder.remove()
        say(decision.sentence)
        if decision.shows_error:
            self.show_first_error(ending)
        return decision

    def forget(self) -> None:
        """Removes what the job keeps for its next start, and its folder in the run's."""
        self.restarts.forget()
        if self.folder:
            self.folder.remove()

    def show_first_error(self, ending: Ending) -> None:
        """Prints the first error of all nodes, last, where a person looks first. After the loss of a node others fail
        because of it."""
        lost = [node for node in self.training_nodes if node in self.watch.lost]
        if lost:
            say("error: lost " + ", ".join(lost))
        elif ending.outcome.error:
            say(ending.outcome.error.rstrip("\n"))
        elif ending.code == KILLED and self.folder:
            say(KILLED_LAUNCHER)

    def seconds_for_removal(self) -> float:
        """Returns for how long the job waits for its containers to be removed."""
        return seconds_for_removal(self.supervisor.asked, slurm.seconds_left(self.job))


def is_being_made(data: str) -> bool:
    """Returns whether another process is making a token store: this job's own has given its leases back."""
    return bool(glob.glob(os.path.join(glob.escape(data), ".progress*", "*.lease")))


def named_paths(words: Sequence[str]) -> List[str]:
    """Returns the paths that must be mounted so that the settings can be read, such as those of
    --config=/elsewhere/my.yaml and of `replay RUN`."""
    paths = []
    for word in words:
        path = word.partition("=")[2]
        if not word.startswith("-"):
            path = os.path.abspath(word)
        if os.path.isabs(path) and os.path.exists(path):
            paths.append(path)
    return paths


def seconds_for_removal(asked: str, seconds_left: Optional[float]) -> float:
    """Returns for how long a job waits for its containers to be removed. asked: the signal that ended it.
    seconds_left: until the time limit; None if a busy controller does not say."""
    if not asked:
        return MAX_REMOVAL_SECONDS
    if asked != "USR1" or seconds_left is None:
        return SHORT_REMOVAL_SECONDS
    return max(SHORT_REMOVAL_SECONDS, seconds_left - LAST_SECONDS)
