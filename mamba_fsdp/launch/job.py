"""What 1.train.sbatch becomes: a training on this machine, or a job's on Slurm's nodes.

    python3 mamba_fsdp/launch/job.py ./1.train.sbatch [--check] [--SETTING=VALUE ...]

It decides; 1.train.sbatch itself only finds it, and starts each node's part. It runs on the host's own Python, with the
standard library alone, since an image's Python is there only once the image is unpacked. launch/plan.py, in the
environment that trains, knows the settings.
"""

import signal

interrupt = signal.getsignal(signal.SIGINT)
if interrupt == signal.default_int_handler:  # not under nohup, say
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # or Ctrl-C would print a traceback of imports

import os
import sys

OLDEST = (3, 6)
if sys.version_info < OLDEST:
    sys.stderr.write(
        "error: %s is Python %d.%d, and a job needs 3.6 or newer: module load python, or put one first in PATH\n"
        % (sys.executable, sys.version_info[0], sys.version_info[1])
    )
    sys.exit(2)
sys.path[0] = os.path.realpath(os.path.join(os.path.dirname(__file__), "..", ".."))

import time
from typing import List

from mamba_fsdp.launch import slurm
from mamba_fsdp.launch.cluster_check import check_nodes
from mamba_fsdp.launch.host import (
    PROJECT,
    Mistake,
    choose_environment,
    read_variables,
    say_error,
    set_up_python,
)
from mamba_fsdp.launch.local_training import train_here
from mamba_fsdp.launch.plan_reader import read_plan_on_host
from mamba_fsdp.launch.slurm_training import train_in_slurm

CHECK = "--check"  # the one word that is no setting
DEMO = ["--config=config/demo.yaml"]  # without words


def main(called: str, words: List[str]) -> int:
    """Runs the training or the check that the words ask for. Returns the exit code."""
    os.environ.setdefault("COMMAND_BEGAN", str(int(time.time())))  # goodput counts from here
    variables = read_variables(os.environ)
    slurm.ignore_options_of_the_shell()
    set_up_python()
    if any(word == "-h" or word.split("=")[0] == "--help" for word in words):
        return show_help(words)
    is_check = CHECK in words
    settings = [word for word in words if word != CHECK]
    is_demo = not settings
    if slurm.is_in_job():
        os.chdir(PROJECT)
        settings = settings or DEMO
        if is_check:
            return check_nodes(settings, variables)
        return train_in_slurm(settings, variables)
    if is_check:
        return check_in_a_job(settings)
    if is_demo:
        os.chdir(PROJECT)
    return train_here(called, settings or DEMO, variables, is_demo)


def show_help(words: List[str]) -> int:
    """Shows the part of the help page that the words ask for. Returns the exit code."""
    answer = read_plan_on_host(words)
    if not answer:
        raise Mistake(
            "--help needs Python 3.10 or newer with PyYAML; make an environment with both: ./0.create_env.sh"
        )
    return answer.code


def check_in_a_job(words: List[str]) -> int:
    """Becomes a job on a node that is free now, which does all that comes before training."""
    if not slurm.has_salloc():
        raise Mistake("--check tries a Slurm cluster, and there is no salloc here")
    os.chdir(PROJECT)
    environment = choose_environment(os.environ.get("IMAGE", ""))
    if environment.image:
        slurm.check_images_run(environment.image)
        os.environ["IMAGE"] = environment.image  # for what a step says of itself
    answer = read_plan_on_host(words or DEMO)
    if answer and not answer.plan:
        return answer.code
    salloc = ["salloc", "--immediate=20", "--nodes=1", "--time=10", "--job-name=mamba-check"]
    os.execvp(salloc[0], salloc + [os.path.join(PROJECT, "1.train.sbatch"), CHECK] + words)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, interrupt)
    try:
        called = "".join(sys.argv[1:2])
        if not called or called.startswith("-"):  # 1.train.sbatch puts its own path there
            raise Mistake("do not run job.py directly; pass these arguments to 1.train.sbatch")
        sys.exit(main(called, sys.argv[2:]))
    except Mistake as mistake:
        say_error(str(mistake))
        sys.exit(Mistake.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)
