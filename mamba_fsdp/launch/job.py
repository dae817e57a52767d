"""The entry point of the launcher. Trains on this machine, or on the nodes of a Slurm job.

    python3 mamba_fsdp/launch/job.py ./1.train.sbatch [--check] [--SETTING=VALUE ...]

1.train.sbatch finds this file and replaces itself with this program. The program runs on the host's
own Python with only the standard library, because the Python of an image exists only after the image
has been unpacked. launch/plan.py resolves the settings in the environment that trains.
"""

import shutil
import signal

interrupt = signal.getsignal(signal.SIGINT)
if interrupt == signal.default_int_handler:  # SIGINT can be ignored, for example in a script
    # With this handler, Ctrl-C during the imports ends the process without a traceback.
    signal.signal(signal.SIGINT, signal.SIG_DFL)

import os
import sys

MIN_PYTHON = (3, 6)
if sys.version_info < MIN_PYTHON:
    sys.stderr.write(
        "error: %s is Python %d.%d, but a job needs 3.6 or newer: module load python, or put a newer one first in PATH\n"
        % (sys.executable, sys.version_info[0], sys.version_info[1])
    )
    sys.exit(2)
sys.path[0] = os.path.realpath(os.path.join(os.path.dirname(__file__), "..", ".."))

import time
from typing import List, NoReturn

from mamba_fsdp.launch import slurm
from mamba_fsdp.launch.cluster_check import check_nodes
from mamba_fsdp.launch.host import (
    PROJECT,
    LaunchError,
    print_error,
    read_variables,
    set_python_variables,
)
from mamba_fsdp.launch.local_training import train_here
from mamba_fsdp.launch.plan_reader import read_plan_on_host
from mamba_fsdp.launch.slurm_training import train_in_slurm

CHECK_OPTION = "--check"  # it is removed before the other arguments are parsed
DEMO_ARGS = ["--config=config/demo.yaml"]  # the settings if the command has no arguments


def main(called: str, args: List[str]) -> int:
    """Runs the training, the check or the help page that the arguments request. Returns the exit code."""
    # The goodput of the run is measured from this time.
    os.environ.setdefault("COMMAND_BEGAN", str(int(time.time())))
    variables = read_variables(os.environ)
    slurm.clear_option_variables()
    set_python_variables()
    if any(word == "-h" or word.split("=")[0] == "--help" for word in args):
        show_help(args)
    is_check = CHECK_OPTION in args
    settings = [word for word in args if word != CHECK_OPTION]
    is_demo = not settings
    if slurm.is_in_job():
        os.chdir(PROJECT)
        settings = settings or DEMO_ARGS
        if is_check:
            return check_nodes(settings, variables)
        return train_in_slurm(settings, variables)
    if is_check:
        submit_check(settings)
    if is_demo:
        os.chdir(PROJECT)
    return train_here(called, settings or DEMO_ARGS, variables, is_demo)


def show_help(args: List[str]) -> NoReturn:
    """Prints the part of the help page that the arguments select, and exits.

    Raises LaunchError if no Python on this host can print it.
    """
    read_plan_on_host(args)
    raise LaunchError(
        "--help needs Python 3.10 or newer with PyYAML; create an environment with both: ./0.create_env.sh"
    )


def submit_check(args: List[str]) -> NoReturn:
    """Replaces this process with salloc, to run `1.train.sbatch --check` on a node that is free
    now.

    Raises LaunchError without Slurm or without a usable environment, and SystemExit if the settings
    are invalid.
    """
    if not shutil.which("salloc"):
        raise LaunchError(
            "--check needs a Slurm cluster, but this machine has no salloc command; run it on a login node"
        )
    os.chdir(PROJECT)
    slurm.choose_environment_of_job(os.environ.get("IMAGE", ""))
    read_plan_on_host(args or DEMO_ARGS)
    salloc = ["salloc", "--immediate=20", "--nodes=1", "--time=10", "--job-name=mamba-check"]
    os.execvp(salloc[0], salloc + [os.path.join(PROJECT, "1.train.sbatch"), CHECK_OPTION] + args)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, interrupt)
    try:
        called = "".join(sys.argv[1:2])
        if not called or called.startswith("-"):  # 1.train.sbatch passes its own path first
            raise LaunchError("do not run job.py directly; pass these arguments to 1.train.sbatch")
        sys.exit(main(called, sys.argv[2:]))
    except LaunchError as error:
        print_error(str(error))
        sys.exit(LaunchError.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)
