"""A training on the nodes of a Slurm job, from its first line to what becomes of the job. For the cluster's own
Python, see host.py."""

import contextlib
import glob
import os
import re
import shutil
import signal
import sys
import time
from typing import Callable, List, Optional, Tuple

from mamba_fsdp.launch import slurm
from mamba_fsdp.launch.containers import container_options, folders_behind_links
from mamba_fsdp.launch.decision import (
    ENDED,
    KILLED,
    MISTAKE,
    Action,
    Decision,
    Ending,
    Outcome,
    decide,
    starts_again_in_place,
)
from mamba_fsdp.launch.host import (
    PROJECT,
    Mistake,
    Variables,
    choose_environment,
    say,
)
from mamba_fsdp.launch.keeper_step import MOST_SECONDS, keeper
from mamba_fsdp.launch.local_training import KILLED_LAUNCHER, dry_run
from mamba_fsdp.launch.node_command import launcher_of, on_node
from mamba_fsdp.launch.plan_reader import MODULE, Plan, parse_answer, read_plan_on_host
from mamba_fsdp.launch.start_folder import StartFolder
from mamba_fsdp.launch.supervisor import StopAsked, Supervisor, TooLate, written_until
from mamba_fsdp.run.names import CACHES, newest_checkpoint

PREFLIGHT_SECONDS = 900  # the first start of a large image on a node takes minutes
SECONDS_BEHIND = 60  # launchers end together; one that is missing for so long never ends
MOST_ALARM_SECONDS = 10**9  # alarm takes no more than 2**31
LAST_SECONDS = 45  # so close to the time limit, the job does not wait for a checkpoint any longer
SHORT_REMOVAL_SECONDS = 10.0  # of containers, after signals at which Slurm does not wait for long
NO_CHECKPOINT = "start"
TOKENIZER_TEXTS = "text"  # of a check, in the start's folder


class GiveWay(Exception):
    """Trouble that may be gone at the job's next start, or its exit code alone if it has been said."""

    def __init__(self, sentence: str = "", code: int = 1) -> None:
        super().__init__(sentence)
        self.code = code


def train_in_slurm(words: List[str], variables: Variables) -> int:
    """Trains on the nodes of this job. Returns the exit code, unless Slurm queues the job again and ends it."""
    training = SlurmTraining(words, variables)
    try:
        with keeper(training.job, training.environment.image, training.seconds_for_removal):
            decision = training.run()
    except Mistake:
        training.forget()
        raise
    if decision.action is Action.END or slurm.queue_again(training.job):
        return decision.exit_code
    say("error: Slurm refused to queue the job again; sbatch the same command to resume")
    return 1


def check_nodes(words: List[str], variables: Variables) -> int:
    """Does all that comes before training, and leaves nothing. Returns the exit code."""
    training = SlurmTraining(words, variables, is_check=True)
    with keeper(training.job, training.environment.image):
        return training.check()


class SlurmTraining:
    """A training under way in a job, on its first node."""

    def __init__(self, words: List[str], variables: Variables, is_check: bool = False) -> None:
        """Reads what the job is, before anything is started. Raises Mistake, or SystemExit after a help page or a
        mistake in the settings."""
        self.words = words
        self.variables = variables
        self.is_check = is_check
        self.supervisor = Supervisor()
        self.job = slurm.this_job()
        self.listen()
        slurm.check_gpus(self.job)
        self.environment = choose_environment(variables.image)
        if self.environment.image:
            slurm.check_images_run(self.environment.image)
            os.environ["IMAGE"] = self.environment.image  # for what a step says of itself
        self.container: List[str] = []
        self.plan: Optional[Plan] = None
        self.folder: Optional[StartFolder] = None
        self.made: List[str] = []  # folders that a check removes again
        self.restarts = RestartCount(self.job)
        self.newest_before = NO_CHECKPOINT
        self.seconds_run = float("inf")  # and left, of this start, when it was asked to stop
        self.seconds_left = float("inf")
        answer = read_plan_on_host(words)
        if answer and not answer.plan:
            sys.exit(answer.code)
        if answer:
            self.plan = answer.plan

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
            self.preflight(plan, folder)
            ending = self.train(plan, folder)
        except (StopAsked, TooLate):
            self.supervisor.send(signal.SIGKILL)  # to a command that heeds no SIGTERM
            ending = self.ending(ENDED)
        except GiveWay as trouble:
            if str(trouble):
                say(f"error: {trouble}")
            ending = self.ending(trouble.code)
        return self.conclude(ending)

    def check(self) -> int:
        """Prepares and checks the nodes, and tries the tokenizer on the first. Returns the exit code."""
        try:
            plan, start = self.prepare()
            self.preflight(plan, start)
            self.try_tokenizer(start)
        except (StopAsked, TooLate):
            return ENDED
        except GiveWay as trouble:
            if str(trouble):
                say(f"error: {trouble}")
            return trouble.code
        finally:
            if self.folder:
                self.folder.remove()
            for folder in reversed(self.made):
                with contextlib.suppress(OSError):
                    os.rmdir(folder)
        say("fit to train")
        return 0

    # ------------------------------------------------------------------------------------------------ before training

    def prepare(self) -> Tuple[Plan, StartFolder]:
        """Starts the containers, reads the settings if only the image can, and makes the start's folder. Returns
        the plan and this folder."""
        named = [
            word.partition("=")[2] for word in self.words
        ]  # --config=/elsewhere/my.yaml has to be read
        self.use_container([path for path in named if os.path.isabs(path) and os.path.exists(path)])
        if self.plan:
            self.count_start()
        self.start_containers()
        if not self.plan:
            self.plan = self.read_plan_in_image()
            self.count_start()
        plan = self.plan
        if plan.dry_run:
            return plan, StartFolder(plan.run_folder, self.job.start, bool(plan.replay))
        self.folder = StartFolder(plan.run_folder, self.job.start, bool(plan.replay))
        self.made = missing_folders(plan.run_folder) + missing_folders(plan.missing_data)
        try:
            self.folder.make(plan.settings)
            if plan.missing_data:  # to be mounted
                os.makedirs(plan.missing_data, exist_ok=True)
        except OSError:
            self.fail_to_write(plan)
        self.use_container(self.folders_of(plan))
        self.make_data(plan)
        return plan, self.folder

    def count_start(self) -> None:
        """Counts this start of the job among those from the same checkpoint."""
        self.newest_before = self.newest()
        if not self.is_check:
            self.restarts.count(self.newest_before)

    def use_container(self, folders: List[str]) -> None:
        """From here on steps run in a container in which these folders are mounted too."""
        mounted = [*self.variables.mounts, *folders]
        self.container = container_options(self.environment.image, self.job.start, mounted)

    def start_containers(self) -> None:
        """Starts the container on all nodes at once: each unpacks the image the only time in this start of the job.
        Raises GiveWay if a node can't."""
        if not self.environment.image:
            return
        say_node = ["sh", "-c", 'echo "started: $SLURMD_NODENAME"']
        said = self.supervisor.output_of(self.on_all_nodes(say_node, limited=True))
        started = re.findall(r"^ *\d+: started: (.*)", said, re.MULTILINE)
        missing = [node for node in self.job.nodes if node not in started]
        if not missing:
            return
        if not self.plan:  # it is not known yet where the checkpoints lie
            self.count_start()
        if len(missing) == len(self.job.nodes):
            raise GiveWay(
                "the container started on no node; see above. If the image is damaged, copy it again; if the disk is full "
                "to which Enroot unpacks (ENROOT_DATA_PATH), make room there",
                MISTAKE,
            )
        raise GiveWay(
            "the container did not start on {}; see above. If a node keeps failing: --exclude=NODE".format(
                ", ".join(missing)
            )
        )

    def read_plan_in_image(self) -> Plan:
        """Returns what the settings mean, as the image on the first node finds out."""
        python = [self.environment.python, *MODULE, "/dev/stdout"]
        said = self.supervisor.output_of(self.on_first_node(python + self.words))
        answer = parse_answer(self.supervisor.last_code, said)
        if answer.plan:
            return answer.plan
        if answer.code in (0, MISTAKE):  # a help page, or a mistake
            say(said.rstrip("\n"))
            raise SystemExit(answer.code)
        raise GiveWay(
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
        if plan.dry_run or self.is_check:
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
        raise GiveWay(sentence + ", as an earlier start of this job could")

    def make_data(self, plan: Plan) -> None:
        """Makes the built-in data if the training needs it."""
        if not plan.missing_data or self.is_check:
            return
        builtin = os.path.relpath(plan.missing_data)
        program = os.path.join(PROJECT, "get_dataset.py")
        words = [self.environment.python, program, "builtin", builtin]
        code = self.supervisor.run(self.on_first_node(words))
        if code != 0:
            raise GiveWay(code=code)

    def preflight(self, plan: Plan, folder: StartFolder) -> None:
        """Has every node report what it finds for these settings. Raises GiveWay if a node is not fit."""
        shutil.rmtree(folder.preflight, ignore_errors=True)
        try:
            os.mkdir(folder.preflight)
        except OSError:
            self.fail_to_write(plan)
        verb = [self.environment.python, "-m", "mamba_fsdp", "preflight"]
        report = [*verb, "report", folder.preflight, folder.settings]
        self.supervisor.run(self.on_all_nodes(report, limited=True))
        judge = [*verb, "judge", folder.preflight, *self.job.nodes]
        code = self.supervisor.run(self.on_first_node(judge))
        if code != 0:
            raise GiveWay(code=code)

    def try_tokenizer(self, folder: StartFolder) -> None:
        """Tokenises a megabyte of this project's own text on the first node, as get_dataset.py does. Raises GiveWay
        if that fails."""
        texts = os.path.join(folder.path, TOKENIZER_TEXTS)
        os.mkdir(texts)
        sources = sorted(glob.glob(os.path.join(glob.escape(PROJECT), "mamba_fsdp", "*", "*.py")))
        for name in (
            "train",
            "validation",
        ):  # two long documents, which two threads encode at the same time
            with open(os.path.join(texts, name + ".txt"), "wb") as together:
                for source in sources:
                    with open(source, "rb") as file:
                        shutil.copyfileobj(file, together)
        words = [self.environment.python, os.path.join(PROJECT, "get_dataset.py"), texts]
        words += [os.path.join(folder.path, "tokens"), "--splits=official", "--tokenizer=train:512"]
        said = self.supervisor.output_of(self.on_first_node(words), with_errors=True)
        if self.supervisor.last_code == 0:
            return
        say(said.rstrip("\n"))
        lines = [line for line in said.splitlines() if not line.startswith("srun: ")]
        last = lines[-1] if lines else "it says nothing"
        raise GiveWay(
            f"the tokenizer fails on {self.job.nodes[0]}: {last}",
            self.supervisor.last_code,
        )

    def dry_run(self, plan: Plan) -> Decision:
        """Says what would be trained."""
        self.use_container([path for path in self.folders_of(plan) if os.path.exists(path)])
        python = self.on_first_node([self.environment.python], with_network=False)
        code = dry_run(python, plan.settings, len(self.job.nodes))
        return Decision(Action.END, code, "")

    # ------------------------------------------------------------------------------------------------ training

    def train(self, plan: Plan, folder: StartFolder) -> Ending:
        """Runs the ranks, again in place after a failure that a restart may fix. Returns how that ended."""
        restarted_from = ""
        with written_until(folder.stop, self.supervisor.reason) as ask:
            while True:
                ending = self.ending(self.run_ranks(plan, folder, ask))
                lost = slurm.lost_nodes() if ending.code != 0 else ""
                if not starts_again_in_place(ending, restarted_from, bool(lost)):
                    return ending
                restarted_from = ending.newest
                say("restarts   the ranks after the loss of " + ending.lost)
                folder.forget_failures()

    def run_ranks(self, plan: Plan, folder: StartFolder, ask: Callable[[], None]) -> int:
        """Runs the ranks of all nodes once. Returns srun's exit code."""
        os.environ["LAST_NODE"] = self.job.nodes[-1]
        launcher = launcher_of(
            self.environment.python, plan.run_folder, self.variables.profile, self.job.start
        )
        launcher += [
            f"--nnodes={len(self.job.nodes)}",
            "--rdzv-backend=c10d",
            "--rdzv-id=" + self.job.start,
            "--rdzv-endpoint=" + slurm.meeting_place(self.job),
            # keep_alive_max_attempt: torchrun judges by the nodes' clocks which of them are alive; one that is down, Slurm
            # finds.
            "--rdzv-conf=join_timeout=900,read_timeout=900,keep_alive_max_attempt=999999",
            *plan.program("training.py", folder.settings),
        ]
        bounds = ["--kill-on-bad-exit=1", f"--wait={SECONDS_BEHIND}"]
        try:
            return self.supervisor.run_training(self.on_all_nodes(launcher, bounds), ask)
        except TooLate:
            say(
                f"{LAST_SECONDS} s before the time limit: the training has not ended, and the job does not wait for it"
            )
            return ENDED

    def on_all_nodes(
        self, command: List[str], options: Optional[List[str]] = None, limited: bool = False
    ) -> List[str]:
        """Returns what runs a command once on each node, inside the container if there is one."""
        srun = slurm.on_all_nodes(self.job) + (options or []) + self.container + on_node(command)
        return ["timeout", str(PREFLIGHT_SECONDS), *srun] if limited else srun

    def on_first_node(self, command: List[str], with_network: bool = True) -> List[str]:
        """Returns what runs a command on the first node. This program is there already, but for a check, which runs
        where salloc was called."""
        if not self.environment.image and not self.is_check:
            return command
        inside = on_node(command) if with_network else command
        return slurm.on_first_node(self.job) + self.container + inside

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
                signal.alarm(min(seconds, MOST_ALARM_SECONDS))

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
            run_folder=self.plan.run_folder if self.plan else "",
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
        lost = slurm.lost_nodes()
        if lost:
            say("error: Slurm has lost " + lost)
        elif ending.outcome.error:
            say(ending.outcome.error.rstrip("\n"))
        elif ending.code == KILLED and self.folder:
            say(KILLED_LAUNCHER)

    def seconds_for_removal(self) -> float:
        """Returns for how long the job waits for its containers to be removed."""
        return seconds_for_removal(self.supervisor.asked, slurm.seconds_left(self.job))


def seconds_for_removal(asked: str, seconds_left: Optional[float]) -> float:
    """Returns for how long a job waits for its containers to be removed. asked: the signal that ended it.
    seconds_left: until the time limit; None if a busy controller does not say."""
    if not asked:
        return MOST_SECONDS
    if asked != "USR1" or seconds_left is None:
        return SHORT_REMOVAL_SECONDS
    return max(SHORT_REMOVAL_SECONDS, seconds_left - LAST_SECONDS)


class RestartCount:
    """How often in a row the job has started from the same checkpoint, in a file: each start is a process of its own."""

    def __init__(self, job: slurm.Job) -> None:
        self.file = os.path.join(PROJECT, "logs", "restarts_" + job.number)
        self.restarts = 0
        self.newest = NO_CHECKPOINT
        self.before = ""  # the newest checkpoint at the job's start before
        if job.restart:
            with contextlib.suppress(OSError, ValueError):
                with open(self.file) as file:
                    count, self.before = file.read().split()
                self.restarts = int(count)
                self.newest = self.before

    def count(self, newest: str) -> None:
        """Counts this start, which begins with this checkpoint as the newest."""
        self.restarts = self.restarts + 1 if self.before == newest else 0
        self.newest = newest
        forget_ended_jobs(os.path.dirname(self.file))
        with contextlib.suppress(OSError):
            os.makedirs(os.path.dirname(self.file), exist_ok=True)
            with open(self.file, "w") as file:
                file.write(f"{self.restarts} {newest}\n")

    def forget(self) -> None:
        """Removes the file, after the job's last start."""
        with contextlib.suppress(OSError):
            os.unlink(self.file)


def forget_ended_jobs(logs: str) -> None:
    """Removes the counts of this user's jobs that ended without a word, as after a kill."""
    living = slurm.jobs_of_this_user(
        "PENDING,RUNNING,SUSPENDED,STOPPED,COMPLETING,CONFIGURING,REQUEUED"
    )
    if living is None:
        return
    for file in glob.glob(os.path.join(glob.escape(logs), "restarts_*")):
        with contextlib.suppress(OSError):
            is_own = os.stat(file).st_uid == os.getuid()
            if is_own and file.rpartition("_")[2] not in living:
                os.unlink(file)


def missing_folders(path: str) -> List[str]:
    """Returns the folder and those above it that are not there, the highest first."""
    missing: List[str] = []
    while path and not os.path.exists(path):
        missing.insert(0, path)
        path = os.path.dirname(path)
    return missing
