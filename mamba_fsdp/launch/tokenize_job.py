"""Runs get_dataset.py in a Slurm job, in the image or in .venv. 2.tokenize.sbatch replaces itself
with this program.

    python3 mamba_fsdp/launch/tokenize_job.py INPUT [OUT] [--OPTION=VALUE ...]

This module runs on the cluster's own Python; host.py describes the restrictions.
"""

import os
import sys

MIN_PYTHON = (3, 6)
if sys.version_info < MIN_PYTHON:
    sys.stderr.write("error: %s is too old: a job needs Python 3.6 or newer\n" % sys.executable)
    sys.exit(2)
sys.path[0] = os.path.realpath(os.path.join(os.path.dirname(__file__), "..", ".."))

import glob
import re
import signal
from typing import List

from mamba_fsdp.launch import slurm
from mamba_fsdp.launch.containers import container_options, find_linked_folders
from mamba_fsdp.launch.host import (
    PROJECT,
    LaunchError,
    choose_environment,
    print_error,
    read_mounts,
    set_python_variables,
    with_node_setup,
)
from mamba_fsdp.launch.node_watch import guard_nodes
from mamba_fsdp.launch.supervisor import StopRequested, Supervisor


def main(args: List[str]) -> int:
    """Runs get_dataset.py with the arguments. Returns its exit code."""
    os.chdir(PROJECT)
    slurm.clear_option_variables()
    set_python_variables()
    mounts = read_mounts(os.environ)
    environment = choose_environment(os.environ.get("IMAGE", ""))
    command = [environment.python, "get_dataset.py"]
    if not slurm.is_in_job():
        if environment.image:
            raise LaunchError(
                "images run only in Slurm jobs: sbatch 2.tokenize.sbatch; to tokenize without an image, run ./0.create_env.sh"
            )
        os.execv(environment.python, command + args)
    job = slurm.this_job()
    slurm.check_is_alive(job)
    if os.environ.get("SLURM_ARRAY_TASK_ID"):
        args = args + ["--part=" + array_part()]
    supervisor = Supervisor()

    def requeue_job(number: int) -> None:
        """Handles the notice of the time limit. Slurm ends this process once the job is queued again."""
        slurm.requeue(job.name)

    supervisor.listen({signal.SIGUSR1: requeue_job, signal.SIGTERM: supervisor.request_stop})
    step: List[str] = []
    if environment.image:
        slurm.check_image_support(environment.image)
        folders = mounts + folders_to_mount(args)
        container = container_options(environment.image, job.start, folders)
        step = slurm.srun_without_gpus(job.nodes[:1]) + container
        command = with_node_setup(command)
    with guard_nodes(job, environment.image):
        try:
            return supervisor.run(step + command + args)
        except StopRequested:
            return 128 + signal.SIGTERM


def array_part() -> str:
    """Returns this task's part of the array, such as 3/64: its position among the task numbers, and
    their count.

    Raises LaunchError if the array is a list of numbers.
    """
    first, last, count, between, own = (
        int(os.environ["SLURM_ARRAY_TASK_" + name])
        for name in ("MIN", "MAX", "COUNT", "STEP", "ID")
    )
    # For an array with a list of numbers such as 5,9, Slurm does not show the list to the tasks, and sets the step to 1.
    if (last - first) // between + 1 != count:
        raise LaunchError(
            "the tasks of an array with a list of numbers can't determine their parts; submit --array=0-{}, or a single "
            "part without --array: --part=NUMBER/N".format(count - 1)
        )
    return "{}/{}".format((own - first) // between, count)


def folders_to_mount(args: List[str]) -> List[str]:
    """Returns the folders of the paths in the arguments, and the targets of symbolic links in them.

    For a path that does not exist, the result contains its nearest parent that exists.
    """
    folders = []
    named = []
    for word in args:
        if word.startswith("--"):
            option, equals, value = word.partition("=")
            if not equals:
                continue
            word = value
        begin = word
        if os.path.exists(word) or not re.search(r"[*?[]", word):
            named.append(word)
        else:  # a glob pattern; ** matches any number of folders
            named += glob.glob(word.partition("/**/")[0])
            begin = os.path.dirname(re.split(r"[*?[]", word)[0] + "x")
        path = os.path.abspath(begin)
        while not os.path.exists(path):
            path = os.path.dirname(path)
        if path != "/":  # the "/" of --delimiter=/ is not a folder
            folders.append(path)
    return folders + find_linked_folders(named)


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except LaunchError as error:
        print_error(str(error))
        sys.exit(LaunchError.exit_code)
