"""A training on this machine: `./1.train.sbatch`, Ctrl-C and what is said at the end. For any Python 3.6, see host.py."""

import contextlib
import glob
import json
import os
import shlex
import shutil
import signal
import subprocess
import tempfile
from typing import Any, Callable, Dict, List

from mamba_fsdp.launch.decision import KILLED, Ending
from mamba_fsdp.launch.host import PROJECT, Mistake, Variables, choose_venv, say, write
from mamba_fsdp.launch.node_command import launcher_of, on_node
from mamba_fsdp.launch.plan_reader import Plan, read_plan
from mamba_fsdp.launch.start_folder import StartFolder, name_here
from mamba_fsdp.launch.starts import Starts
from mamba_fsdp.launch.supervisor import Supervisor, processes_below, written_until
from mamba_fsdp.run.names import STATUS, newest_checkpoint

INTERRUPTED = 130
KILLED_LAUNCHER = "error: a launcher was killed by SIGKILL, and all ranks with it; the kernel does so when memory runs out (dmesg)"


def train_here(called: str, words: List[str], variables: Variables, is_demo: bool) -> int:
    """Trains on this machine. Returns the exit code. called: the command's name, to resume by."""
    python = choose_venv().python
    with contextlib.suppress(KeyboardInterrupt):
        answer = read_plan(python, words)
        if not answer.plan:
            return answer.code
        if answer.plan.dry_run:
            return dry_run([python], answer.plan.settings, nodes=1)
        training = LocalTraining(python, answer.plan, variables)
        code = training.run()
        if training.is_resumable:
            command = [called] + ([] if is_demo else words)
            newest = newest_checkpoint(answer.plan.run_folder) or "start"
            say("to resume from {}: {}".format(newest, " ".join(map(shlex.quote, command))))
        if code == 0 and is_demo and training.status().get("status") == "finished":
            training.give_back_signals()
            show_demo(python)
        return code
    return INTERRUPTED


def dry_run(python: List[str], settings: Dict[str, Any], nodes: int) -> int:
    """Says what would be trained on so many nodes, by one process without ranks, which leaves nothing. Returns its
    exit code. python: the command's first words."""
    os.environ["MAMBA_FSDP_NODES"] = str(nodes)
    command = [*python, os.path.join(PROJECT, "training.py"), "--resolved=/dev/stdin"]
    done = subprocess.run(command, input=json.dumps(settings).encode())
    if done.returncode == 0:
        say("dry run: nothing was trained")
    return done.returncode


class LocalTraining:
    """A training under way on this machine."""

    def __init__(self, python: str, plan: Plan, variables: Variables) -> None:
        self.python = python
        self.plan = plan
        self.variables = variables
        self.supervisor = Supervisor()
        self.folder = StartFolder(plan.run_folder, name_here(), bool(plan.replay))
        self.status_before = self.status()
        self.interrupts = 0
        self.was_killed = False  # the launcher, since the user did not want to wait
        self.stopped_at_once = False  # before the first step
        self.ask: Callable[[], None] = lambda: None  # the ranks to stop
        self.handlers_before: Dict[int, Any] = {}
        self.hurries = signal.SIGTERM  # what ends the command that runs now at once

    @property
    def is_resumable(self) -> bool:
        """Whether the user stopped the training after it had begun."""
        return bool(self.supervisor.asked) and not self.stopped_at_once

    def run(self) -> int:
        """Returns the exit code of the training, which starts again after a rank failed."""
        try:
            self.folder.make(self.plan.settings)
        except OSError:
            self.folder.remove()
            raise Mistake("save_ckpt_path: can't write to " + self.plan.run_folder) from None
        self.listen()
        try:
            with written_until(self.folder.stop, self.supervisor.reason) as self.ask:
                return self.make_data() or self.train()
        finally:
            self.ignore_signals()
            self.folder.remove()

    def make_data(self) -> int:
        """Makes the built-in data if the training needs it. Returns an exit code."""
        if not self.plan.missing_data:
            return 0
        builtin = os.path.relpath(self.plan.missing_data)
        words = [self.python, os.path.join(PROJECT, "get_dataset.py"), "builtin", builtin]
        code = self.supervisor.run_training(words, self.supervisor.terminate)
        if self.supervisor.asked:
            return self.say_end(self.ending(code))
        return code

    def train(self) -> int:
        """Runs the ranks, again after a failure that a restart may fix. Returns the exit code."""
        words = ["--standalone", "--rdzv-id=" + os.path.basename(self.folder.path)]
        words += self.plan.program(os.path.join(PROJECT, "training.py"), self.folder.settings)
        self.hurries = signal.SIGQUIT  # at which a launcher kills its ranks
        launcher = launcher_of(
            self.python, self.plan.run_folder, self.variables.profile, str(os.getpid())
        )
        if self.variables.profile != "nsys":  # whose process would be in between
            os.environ["LAUNCHER_PID"] = str(os.getpid())  # it and its ranks end with this process
        command = on_node(launcher + words)
        starts = Starts(lambda: self.run_launcher(command), self.ending)
        return self.say_end(starts.run())

    def run_launcher(self, command: List[str]) -> int:
        """Returns the launcher's exit code, after removing what it leaves if it is killed."""
        self.folder.forget_failures()
        code = self.supervisor.run_training(command, self.ask)
        left = f"mamba-train-{self.supervisor.last_pid}-*"
        for folder in glob.glob(os.path.join(glob.escape(tempfile.gettempdir()), left)):
            shutil.rmtree(folder, ignore_errors=True)
        return code

    def ending(self, code: int) -> Ending:
        """Returns what is known now that the launcher has ended with this code."""
        newest = newest_checkpoint(self.plan.run_folder) or "start"
        outcome = self.folder.outcome()
        return Ending(
            code=outcome.code if outcome.status else code,
            outcome=outcome,
            run_folder=self.plan.run_folder,
            newest=newest,
            newest_before=newest,
            restarts=0,
            max_restarts=self.variables.max_restarts,
            asked=self.supervisor.asked,
        )

    def say_end(self, ending: Ending) -> int:
        """Says the first error of the ranks, or that nothing was lost. Returns the exit code."""
        if ending.outcome.error:
            write(2, ending.outcome.error)
        elif ending.code == KILLED and not self.was_killed:
            say(KILLED_LAUNCHER)
        if self.stopped_at_once:
            say()
            say("stopped    before the first step of this start: nothing was lost")
        if self.supervisor.asked and (ending.code == 0 or self.was_killed):
            return 128 + signal.Signals["SIG" + self.supervisor.asked]
        return ending.code

    # ------------------------------------------------------------------------------------------------ signals

    def listen(self) -> None:
        """Takes the signals of a terminal. Under nohup a closed terminal stays without effect."""
        handlers: Dict[int, Callable[[int], None]] = {
            signal.SIGINT: self.interrupt,
            signal.SIGTERM: self.stop,
            signal.SIGTSTP: self.stand_still,
        }
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
            handlers[signal.SIGHUP] = self.stop
        self.handlers_before = {number: signal.getsignal(number) for number in handlers}
        self.supervisor.listen(handlers)

    def give_back_signals(self) -> None:
        """Lets signals do what they did before the training: Ctrl-C ends what runs."""
        for number, handler in self.handlers_before.items():
            signal.signal(number, handler)

    def ignore_signals(self) -> None:
        """Lets no signal disturb the last words."""
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)

    def interrupt(self, number: int) -> None:
        """Handles Ctrl-C: the second time it does not wait."""
        self.interrupts += 1
        if self.interrupts > 1:
            self.hurry()
        self.stop(number)

    def stop(self, number: int) -> None:
        """Asks the ranks to stop, or ends them at once before the first step. A window that closes may say so twice, and
        after Ctrl-C too."""
        if not self.supervisor.asked and not self.has_stepped():
            say()
            say("stopping   at once")
            self.stopped_at_once = True
            self.hurry()
        elif not self.supervisor.asked:
            say()
            say(
                "stopping   once the ranks, which look each second, have ended a step and written a checkpoint; Ctrl-C "
                "again doesn't wait"
            )
        self.supervisor.ask_to_stop(number)

    def hurry(self) -> None:
        """Ends what runs now without waiting for a checkpoint."""
        self.was_killed = True
        self.supervisor.send(self.hurries)

    def stand_still(self, number: int) -> None:
        """Handles Ctrl-Z, until fg or SIGCONT: the ranks are in sessions of their own, which no terminal reaches."""
        child = self.supervisor.child
        processes = [child.pid, *processes_below(child.pid)] if child else []
        send_to(processes, signal.SIGSTOP)
        os.kill(os.getpid(), signal.SIGSTOP)
        send_to(processes, signal.SIGCONT)

    def status(self) -> Dict[str, Any]:
        """Returns the run's status; {} without one."""
        with contextlib.suppress(OSError, ValueError):
            with open(os.path.join(self.plan.run_folder, STATUS)) as file:
                status = json.load(file)
                return status if isinstance(status, dict) else {}
        return {}

    def has_stepped(self) -> bool:
        """Returns whether this start has made a step: the status is then another one, and no longer that of a start."""
        status = self.status()
        return status != self.status_before and status.get("reason") != "starting"


def send_to(processes: List[int], number: int) -> None:
    for pid in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def show_demo(python: str) -> None:
    """Shows what the demo's model writes, and how to go on from there."""
    say()
    say('what it writes after "def ":')
    subprocess.run([python, "-m", "mamba_fsdp", "generate", "runs/demo", "--prompt=def "])
    say(
        """
runs/demo holds the run: metrics.jsonl its losses, checkpoints/ its states,
pth/ the trained model; data/builtin holds its text as tokens. For your text:
  .venv/bin/python get_dataset.py FILE data/mine
  ./1.train.sbatch --dataset_path=data/mine --save_ckpt_path=runs/mine
To train on from here (--help shows the settings):
  ./1.train.sbatch --config=config/demo.yaml --num_steps=2000"""
    )
