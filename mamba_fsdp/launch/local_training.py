"""Trains on this machine: `./1.train.sbatch` without Slurm, including Ctrl-C, Ctrl-Z and the
messages at the end.

This module runs on Python 3.6 or newer; host.py describes the restrictions.
"""

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

from mamba_fsdp.launch.decision import EXIT_SIGKILL, JobState
from mamba_fsdp.launch.host import (
    PROJECT,
    LaunchError,
    Variables,
    choose_venv,
    launcher_command,
    print_line,
    read_json,
    with_node_setup,
    write,
)
from mamba_fsdp.launch.plan_reader import Plan, read_plan
from mamba_fsdp.launch.start_folder import StartFolder, local_start_name
from mamba_fsdp.launch.starts import RankRestarts
from mamba_fsdp.launch.supervisor import Supervisor, list_children, stop_file_writer
from mamba_fsdp.run.names import STARTING_REASON, STATUS, newest_checkpoint

INTERRUPTED = 130
KILLED_LAUNCHER = "error: a launcher was killed by SIGKILL, and all its ranks with it; the most likely cause is that the node ran out of memory (see dmesg)"


def train_here(called: str, args: List[str], variables: Variables, is_demo: bool) -> int:
    """Trains on this machine. Returns the exit code.

    called: the command's name in the message that explains how to resume. is_demo: whether the
    command had no arguments, so `args` are those of the demo.
    """
    python = choose_venv().python
    with contextlib.suppress(KeyboardInterrupt):
        plan = read_plan(python, args)
        if plan.dry_run:
            return dry_run([python], plan.settings, nodes=1)
        training = LocalTraining(python, plan, variables)
        code = training.run()
        if training.is_resumable:
            command = [called] + ([] if is_demo else args)
            newest = newest_checkpoint(plan.run_folder) or "start"
            print_line("to resume from {}: {}".format(newest, " ".join(map(shlex.quote, command))))
        if code == 0 and is_demo and training.status().get("status") == "finished":
            show_demo(python)
        return code
    return INTERRUPTED


def dry_run(python: List[str], settings: Dict[str, Any], nodes: int) -> int:
    """Prints what a training on this number of nodes would do. Returns the exit code.

    The dry run uses one process without ranks, and leaves no files. python: the command that starts
    Python.
    """
    os.environ["MAMBA_FSDP_NODES"] = str(nodes)
    command = [*python, os.path.join(PROJECT, "training.py"), "--resolved=/dev/stdin"]
    done = subprocess.run(command, input=json.dumps(settings).encode())
    if done.returncode == 0:
        print_line("dry run: nothing was trained")
    return done.returncode


class LocalTraining:
    """A training on this machine, from the checked settings to its end."""

    def __init__(self, python: str, plan: Plan, variables: Variables) -> None:
        self.python = python
        self.plan = plan
        self.variables = variables
        self.supervisor = Supervisor()
        self.folder = StartFolder(plan.run_folder, local_start_name(), bool(plan.replay))
        self.status_before = self.status()
        self.interrupts = 0
        # Whether the user ended the launcher without waiting for a checkpoint.
        self.was_killed = False
        self.stopped_before_first_step = False
        self.ask_ranks: Callable[[], None] = lambda: None  # asks the ranks to stop
        self.immediate_stop_signal = signal.SIGTERM  # ends the current command immediately

    @property
    def is_resumable(self) -> bool:
        """Whether the user stopped the training after its first step."""
        return bool(self.supervisor.stop_signal) and not self.stopped_before_first_step

    def run(self) -> int:
        """Runs the training, and restarts it after a rank failed. Returns the exit code."""
        try:
            self.folder.make(self.plan.settings)
        except OSError:
            self.folder.remove()
            raise LaunchError(
                f"save_ckpt_path: can't write to {self.plan.run_folder}; choose another folder, or make this one writable"
            ) from None
        self.listen()
        try:
            with stop_file_writer(self.folder.stop, self.supervisor.reason) as self.ask_ranks:
                return self.make_data() or self.train()
        finally:
            # Ignore later signals, so that the last messages are complete.
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                signal.signal(number, signal.SIG_IGN)
            self.folder.remove()

    def make_data(self) -> int:
        """Makes the built-in data if the training needs it. Returns an exit code."""
        if not self.plan.missing_data:
            return 0
        builtin = os.path.relpath(self.plan.missing_data)
        args = [self.python, os.path.join(PROJECT, "get_dataset.py"), "builtin", builtin]
        code = self.supervisor.run_training(args, self.supervisor.terminate)
        if self.supervisor.stop_signal:
            return self.print_end(self.job_state(code))
        return code

    def train(self) -> int:
        """Runs the ranks, and restarts them after a failure that a restart can fix. Returns the
        exit code.
        """
        args = ["--standalone", "--rdzv-id=" + os.path.basename(self.folder.path)]
        args += self.plan.rank_command(os.path.join(PROJECT, "training.py"), self.folder.settings)
        self.immediate_stop_signal = signal.SIGQUIT  # the launcher then kills its ranks
        launcher = launcher_command(
            self.python, self.plan.run_folder, self.variables.profile, str(os.getpid())
        )
        # The launcher and its ranks end with this process. Under nsys, the launcher is not our child.
        if self.variables.profile != "nsys":
            os.environ["LAUNCHER_PID"] = str(os.getpid())
        command = with_node_setup(launcher + args)
        starts = RankRestarts(lambda: self.run_launcher(command), self.job_state)
        return self.print_end(starts.run())

    def run_launcher(self, command: List[str]) -> int:
        """Runs the launcher, and removes the temporary folders that a killed launcher leaves. Returns
        the exit code of the launcher.
        """
        self.folder.remove_outcome()
        code = self.supervisor.run_training(command, self.ask_ranks)
        pattern = f"mamba-train-{self.supervisor.last_pid}-*"
        for folder in glob.glob(os.path.join(glob.escape(tempfile.gettempdir()), pattern)):
            shutil.rmtree(folder, ignore_errors=True)
        return code

    def job_state(self, code: int) -> JobState:
        """Returns the state of the training after the launcher has ended with this exit code."""
        newest = newest_checkpoint(self.plan.run_folder) or "start"
        outcome = self.folder.outcome()
        return JobState(
            code=outcome.code if outcome.status else code,
            outcome=outcome,
            run_folder=self.plan.run_folder,
            newest=newest,
            newest_before=newest,
            restarts=0,
            max_restarts=self.variables.max_restarts,
            stop_signal=self.supervisor.stop_signal,
        )

    def print_end(self, state: JobState) -> int:
        """Prints the first error of the ranks, or that nothing was lost. Returns the exit code."""
        if state.outcome.error:
            write(2, state.outcome.error)
        elif state.code == EXIT_SIGKILL and not self.was_killed:
            print_line(KILLED_LAUNCHER)
        if self.stopped_before_first_step:
            print_line()
            print_line("stopped    before the first step of this start: nothing was lost")
        if self.supervisor.stop_signal and (state.code == 0 or self.was_killed):
            return 128 + signal.Signals["SIG" + self.supervisor.stop_signal]
        return state.code

    # ------------------------------------------------------------------------------------------------ signals

    def listen(self) -> None:
        """Installs the handlers of the signals that a terminal sends.

        SIGHUP stays ignored if nohup ignored it, so that closing the terminal does not end the
        training.
        """
        handlers: Dict[int, Callable[[int], None]] = {
            signal.SIGINT: self.interrupt,
            signal.SIGTERM: self.stop,
            signal.SIGTSTP: self.suspend,
        }
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
            handlers[signal.SIGHUP] = self.stop
        self.supervisor.listen(handlers)

    def interrupt(self, number: int) -> None:
        """Handles Ctrl-C. The second time, the ranks are ended without a checkpoint."""
        self.interrupts += 1
        if self.interrupts > 1:
            self.stop_now()
        self.stop(number)

    def stop(self, number: int) -> None:
        """Asks the ranks to stop, or ends them immediately if they have not completed a step.

        A terminal that closes can send several signals, also after Ctrl-C; all but the first are
        ignored.
        """
        if not self.supervisor.stop_signal and not self.has_completed_step():
            print_line()
            print_line("stopping   immediately")
            self.stopped_before_first_step = True
            self.stop_now()
        elif not self.supervisor.stop_signal:
            print_line()
            print_line(
                "stopping   after the current step and a checkpoint; press Ctrl-C again to stop immediately"
            )
        self.supervisor.request_stop(number)

    def stop_now(self) -> None:
        """Ends the current command without waiting for a checkpoint."""
        self.was_killed = True
        self.supervisor.send(self.immediate_stop_signal)

    def suspend(self, number: int) -> None:
        """Handles Ctrl-Z: suspends the ranks and this process until fg or SIGCONT.

        The ranks run in their own sessions, so the terminal's signals do not reach them.
        """
        child = self.supervisor.child
        processes = [child.pid, *list_children(child.pid)] if child else []
        send_to(processes, signal.SIGSTOP)
        os.kill(os.getpid(), signal.SIGSTOP)
        send_to(processes, signal.SIGCONT)

    def status(self) -> Dict[str, Any]:
        """Returns the content of the run's status.json; {} if it does not exist."""
        return read_json(os.path.join(self.plan.run_folder, STATUS))

    def has_completed_step(self) -> bool:
        """Returns whether this start has completed a step: the status has changed, and its reason
        is not "starting".
        """
        status = self.status()
        return status != self.status_before and status.get("reason") != STARTING_REASON


def send_to(processes: List[int], number: int) -> None:
    """Sends a signal to processes. Those that have ended are skipped."""
    for pid in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def show_demo(python: str) -> None:
    """Shows a sample of the demo's model, and prints commands to continue with."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGTSTP):  # the training has ended
        signal.signal(number, signal.SIG_DFL)
    print_line()
    print_line('the model continues "def " with:')
    subprocess.run([python, "-m", "mamba_fsdp", "generate", "runs/demo", "--prompt=def "])
    print_line(
        """
runs/demo contains the run: its losses in metrics.jsonl, its states in checkpoints/ and
the trained model in pth/. data/builtin contains the tokenized text. To train on your text:
  .venv/bin/python get_dataset.py FILE data/mine
  ./1.train.sbatch --dataset_path=data/mine --save_ckpt_path=runs/mine
To continue this training (--help lists the settings):
  ./1.train.sbatch --config=config/demo.yaml --num_steps=2000"""
    )
