"""What 2.tokenize.sbatch becomes: get_dataset.py in a Slurm job, in the image or in .venv.

    python3 mamba_fsdp/launch/tokenize_job.py INPUT [OUT] [--OPTION=VALUE ...]

For the cluster's own Python, see host.py.
"""

import os
import sys

OLDEST = (3, 6)
if sys.version_info < OLDEST:
    sys.stderr.write("error: %s is older than Python 3.6, which a job needs\n" % sys.executable)
    sys.exit(2)
sys.path[0] = os.path.realpath(os.path.join(os.path.dirname(__file__), "..", ".."))

import glob
import re
import signal
from typing import List

from mamba_fsdp.launch import slurm
from mamba_fsdp.launch.containers import container_options, folders_behind_links
from mamba_fsdp.launch.guard_step import guarded
from mamba_fsdp.launch.host import (
    PROJECT,
    Mistake,
    choose_environment,
    read_mounts,
    say_error,
    set_up_python,
)
from mamba_fsdp.launch.node_command import on_node
from mamba_fsdp.launch.supervisor import StopAsked, Supervisor


def main(words: List[str]) -> int:
    """Tokenises as the words say. Returns get_dataset.py's exit code."""
    os.chdir(PROJECT)
    slurm.ignore_options_of_the_shell()
    set_up_python()
    mounts = read_mounts(os.environ)
    environment = choose_environment(os.environ.get("IMAGE", ""))
    command = [environment.python, "get_dataset.py"]
    if not slurm.is_in_job():
        if environment.image:
            raise Mistake(
                "an image runs in a job only: sbatch 2.tokenize.sbatch; without one: ./0.create_env.sh"
            )
        os.execv(environment.python, command + words)
    job = slurm.this_job()
    if os.environ.get("SLURM_ARRAY_TASK_ID"):
        words = words + ["--part=" + own_part()]
    supervisor = Supervisor()

    def queue_again(number: int) -> None:
        """Handles the notice of the time limit: Slurm ends this process then."""
        slurm.requeue(job.name)

    supervisor.listen({signal.SIGUSR1: queue_again, signal.SIGTERM: supervisor.ask_to_stop})
    step: List[str] = []
    if environment.image:
        slurm.check_images_run(environment.image)
        folders = mounts + folders_of(words)
        container = container_options(environment.image, job.start, folders)
        step = slurm.on_hosts(job.nodes[:1]) + container
        command = on_node(command)
    with guarded(job, environment.image):
        try:
            return supervisor.run(step + command + words)
        except StopAsked:
            return 128 + signal.SIGTERM


def own_part() -> str:
    """Returns this task's rank among the array's numbers, whatever they are, and how many there are: 3/64."""
    first, last, count, between, own = (
        int(os.environ["SLURM_ARRAY_TASK_" + name])
        for name in ("MIN", "MAX", "COUNT", "STEP", "ID")
    )
    # Slurm tells no task the numbers of a list such as 5,9, and calls what is between them 1.
    if (last - first) // between + 1 != count:
        raise Mistake(
            "the tasks of a list of numbers can't know their parts; submit --array=0-{}, or for one part of N: "
            "no --array but --part=NUMBER/N".format(count - 1)
        )
    return "{}/{}".format((own - first) // between, count)


def folders_of(words: List[str]) -> List[str]:
    """Returns what the words name, or the folder in which it may be made, and where symbolic links in it lead."""
    folders = []
    named = []
    for word in words:
        if word.startswith("--"):
            option, equals, value = word.partition("=")
            if not equals:
                continue
            word = value
        begin = word
        if os.path.exists(word) or not re.search(r"[*?[]", word):
            named.append(word)
        else:  # of a pattern what it matches; ** any folders
            named += glob.glob(word.partition("/**/")[0])
            begin = os.path.dirname(re.split(r"[*?[]", word)[0] + "x")
        path = os.path.abspath(begin)
        while not os.path.exists(path):
            path = os.path.dirname(path)
        if path != "/":  # --delimiter=/
            folders.append(path)
    return folders + folders_behind_links(named)


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except Mistake as mistake:
        say_error(str(mistake))
        sys.exit(Mistake.exit_code)
