"""Calls Slurm's commands, each through one function with a typed result.

This module runs on the cluster's own Python; host.py describes the restrictions.
"""

import os
import re
import subprocess
import tempfile
import time
from datetime import datetime
from typing import Callable, Collection, Dict, List, NamedTuple, Optional, Sequence, Set

from mamba_fsdp.launch.host import (
    Environment,
    LaunchError,
    choose_environment,
    command_output,
    print_line,
)

HYPERPOD_FOLDER = "/opt/sagemaker_cluster"  # exists on SageMaker HyperPod only
FIRST_PORT = 20000  # the first port that jobs use for the rendezvous
PORTS = 10000  # the number of ports that jobs use for the rendezvous
REQUEUED_STATES = ("PENDING", "COMPLETING")  # states of a job that has already been queued again
MAX_ATTEMPTS = 5  # number of attempts to queue the job again, or to change it
MAX_SLURMD_TIMEOUT = 600  # seconds; Slurm's default is 300
DEFAULT_SLURMD_PORT = 6818
GUARD_STEP = "mamba-guard"  # name of the job step that runs launch/node_guard.py
# Variables that describe the job and its memory; each step inherits them. All other variables of Slurm's commands
# are options that a user has set in a shell, such as SLURM_KILL_BAD_EXIT or SQUEUE_FORMAT.
JOB_VARIABLES = re.compile(
    "SLURM_(CONF|CLUSTER_NAME|JOB.*|NODELIST|STEP_?ID|ARRAY_.*|RESTART_COUNT|HET_SIZE|SUBMIT_.*|NODEID|PROCID|LOCALID"
    "|GPUS_ON_NODE|CPUS_ON_NODE|MEM_PER_.*|TASKS_PER_NODE)$"
)
OPTION_VARIABLES = re.compile("(SLURM|SRUN|SQUEUE|SINFO|SCONTROL|SCANCEL)_")
UNUSABLE_STATES = re.compile(r"down|drain|drng|fail|unk|err|maint|boot|inval|[*]")


class Job(NamedTuple):
    """The job of this process."""

    number: str
    # The argument for Slurm's commands: NUMBER, or ARRAY_TASK for a task of an array. One task of an array has
    # the number of the array, so a command with `number` could affect all tasks.
    name: str
    restart: int  # how often Slurm has restarted the job
    nodes: List[str]  # host names; this program runs on the first node

    @property
    def start(self) -> str:
        """The name of this start of the job, such as 77.0."""
        return f"{self.number}.{self.restart}"


def clear_option_variables() -> None:
    """Removes environment variables that would change what Slurm's commands do or print."""
    for name in list(os.environ):
        if OPTION_VARIABLES.match(name) and not JOB_VARIABLES.match(name):
            del os.environ[name]


def is_in_job() -> bool:
    """Returns whether this process runs in a Slurm job."""
    return bool(os.environ.get("SLURM_JOB_ID"))


def this_job() -> Job:
    """Returns the job of this process.

    Raises LaunchError if the job is heterogeneous, because its parts can't train together.
    """
    number = os.environ["SLURM_JOB_ID"]
    if os.environ.get("SLURM_HET_SIZE"):
        raise LaunchError(
            "the parts of a heterogeneous job (sbatch ... : ...) can't train together; request nodes of one kind: "
            "sbatch --nodes=N"
        )
    name = number
    if os.environ.get("SLURM_ARRAY_TASK_ID"):
        name = "{SLURM_ARRAY_JOB_ID}_{SLURM_ARRAY_TASK_ID}".format(**os.environ)
    nodes = host_names(os.environ.get("SLURM_JOB_NODELIST", ""))
    restart = int(os.environ.get("SLURM_RESTART_COUNT") or 0)
    return Job(number, name, restart, nodes)


def check_is_alive(job: Job) -> None:
    """Raises LaunchError if the job has ended. A shell can still have the job's environment variables,
    for example the shell of an expired salloc.
    """
    # The output begins with a header. If it is empty, the controller has not answered.
    jobs = command_output("squeue", f"--user={os.getuid()}", "--format=%A").split()
    if not job.nodes or (jobs and job.number not in jobs):
        raise LaunchError(
            f"SLURM_JOB_ID={job.number} is set, but Slurm has no such job any more: unset SLURM_JOB_ID to use this machine "
            "without Slurm, or sbatch this file"
        )


def host_names(node_list: str) -> List[str]:
    """Expands a node list in Slurm's notation, such as node[1-2]."""
    return command_output("scontrol", "show", "hostnames", node_list).split() if node_list else []


def check_gpus(job: Job) -> None:
    """Raises LaunchError if the nodes have different GPUs, because a step requests the same number
    on each node.
    """
    shown = command_output("scontrol", "--details", "show", "job", job.name)
    assigned = re.findall(r"^ *Nodes=(\S+) .*GRES=(gpu:[^(\s]*)", shown, re.MULTILINE)
    if len({gpus for _, gpus in assigned}) > 1:
        listed = ", ".join(" ".join(pair) for pair in assigned)
        raise LaunchError(
            f"the nodes have different GPUs ({listed}); select nodes of one kind with --partition, --constraint or "
            "--exclude"
        )


def choose_environment_of_job(image: str) -> Environment:
    """Returns the environment of `choose_environment`, and sets IMAGE for launch/plan.py and the job's steps.

    Raises LaunchError like `choose_environment`, and if Slurm can't run images.
    """
    environment = choose_environment(image)
    if environment.image:
        check_image_support(environment.image)
        os.environ["IMAGE"] = environment.image
    return environment


def check_image_support(image: str) -> None:
    """Raises LaunchError if this Slurm has no container plugin that can run steps in images."""
    if "--container-image" not in command_output("srun", "--help"):
        raise LaunchError(
            "Slurm can't run images here, because its plugin Pyxis is not enabled; docs/image.md explains how to enable it; "
            f"to train without an image, rename {image} and run ./0.create_env.sh"
        )


# ------------------------------------------------------------------------------------------------ steps


def srun_on_nodes(nodes: Sequence[str]) -> List[str]:
    """Returns the srun command that runs a command once on each of these nodes of the job, with the
    GPUs.
    """
    srun = srun_without_gpus(nodes) + ["--label"]
    # A step gets only the GPUs that it requests, even if the job has all GPUs through --exclusive.
    gpus = os.environ.get("SLURM_GPUS_ON_NODE")
    if gpus:
        srun.append(f"--gpus-per-node={gpus}")
    if os.path.isdir(HYPERPOD_FOLDER):
        srun.append("--auto-resume=1")  # HyperPod replaces a broken node and starts this step again
    return srun


def srun_without_gpus(nodes: Sequence[str]) -> List[str]:
    """Returns the srun command that runs a command once on each of these nodes, without GPUs.

    --nodelist is necessary because the job's variables still contain a node that the job has lost.
    --overlap lets the step share nodes with an interactive step of the user, or with a step that
    has not ended on a lost node. --cpu-bind=none prevents Slurm from binding the only task of a
    node, and thereby all ranks, to one core.
    """
    count = len(nodes)
    srun = ["srun", f"--nodes={count}", f"--ntasks={count}", "--ntasks-per-node=1"]
    return [*srun, "--nodelist=" + ",".join(nodes), "--overlap", "--export=ALL", "--cpu-bind=none"]


def rendezvous_endpoint(job: Job, first_node: str, attempt: int) -> str:
    """Returns HOST:PORT, where the launchers of all nodes meet.

    HOST is a name instead of an address, because a replaced node keeps its name. Each attempt has
    its own port, because processes of the previous attempt can still use theirs.
    """
    return f"{first_node}:{FIRST_PORT + (int(job.number) + attempt) % PORTS}"


def kill_steps_on(job: Job, node: str) -> None:
    """Kills the steps of the job that run on a lost node, on all their nodes. The guards are not
    killed.

    Otherwise ranks could wait for the lost node for minutes, until Slurm has noticed the loss.
    """
    listed = command_output(
        "squeue", "--steps", "--noheader", "--jobs=" + job.name, "--format=%i %j %N"
    )
    for line in listed.splitlines():
        step, name, nodes = (line.split() + ["", "", ""])[:3]
        if name != GUARD_STEP and node in host_names(nodes):
            # --ctld sends the request through the controller; scancel would wait ten seconds for the lost node.
            command_output("scancel", "--ctld", "--signal=KILL", step)


# ------------------------------------------------------------------------------------------------ the job's state


def query_state(job: Job) -> str:
    """Returns the state of the job, such as RUNNING. Repeats the query until the controller answers."""
    while True:
        answer = command_output("squeue", "--noheader", "--jobs=" + job.name, "--format=%T").split()
        if answer:
            return answer[0]
        time.sleep(2)


def jobs_of_this_user(states: str) -> Optional[Set[str]]:
    """Returns the numbers of this user's jobs in these states; None if the controller does not answer."""
    me = f"--user={os.getuid()}"
    answer = command_output("squeue", "--noheader", me, "--states=" + states, "--format=%A")
    numbers = set(answer.split())
    return numbers or None  # an empty answer is an error, because this job is one of them


def seconds_left(job: Job) -> Optional[float]:
    """Returns the seconds until the job's time limit; None without a limit or if the controller
    does not answer.
    """
    end = _time(job, "EndTime")
    return None if end is None else end - time.time()


def seconds_run(job: Job) -> float:
    """Returns the seconds since this start of the job began; infinity if the controller does not
    answer.
    """
    start = _time(job, "StartTime")
    return float("inf") if start is None else time.time() - start


def show_job(job: Job) -> str:
    """Returns the fields of the job; "" if the controller does not answer."""
    return command_output("scontrol", "show", "job", job.name)


def _time(job: Job, field: str) -> Optional[float]:
    found = re.search(rf"\b{field}=(\d+-\d+-\d+T\d+:\d+:\d+)", show_job(job))
    if not found:
        return None
    return datetime.strptime(found.group(1), "%Y-%m-%dT%H:%M:%S").timestamp()


def nodes_down(nodes: Sequence[str]) -> List[str]:
    """Returns which of the nodes Slurm considers down."""
    down = command_output(
        "sinfo", "--noheader", "--nodes=" + ",".join(nodes), "--states=down", "--format=%n"
    )
    return [node for node in nodes if node in down.split()]


def wait_until_known(nodes: Sequence[str], responds: Callable[[str], bool]) -> None:
    """Waits for each of the nodes until Slurm considers it down, or it responds again, but at most
    MAX_SLURMD_TIMEOUT. Until then Slurm would assign lost nodes to the job's next start.

    responds: returns whether a node responds.
    """
    end = time.monotonic() + MAX_SLURMD_TIMEOUT
    while time.monotonic() < end:
        down = nodes_down(nodes)
        if all(node in down or responds(node) for node in nodes):
            return
        time.sleep(5)


def slurmd_port() -> int:
    """Returns the port of Slurm's daemon on each node."""
    found = re.search(
        r"^SlurmdPort\s*=\s*(\d+)", command_output("scontrol", "show", "config"), re.MULTILINE
    )
    return int(found.group(1)) if found else DEFAULT_SLURMD_PORT


def has_other_nodes(count: int, left_out: Collection[str]) -> bool:
    """Returns whether the job's partition has `count` usable nodes that are not in `left_out`."""
    partition = os.environ.get("SLURM_JOB_PARTITION", "")
    listed = command_output(
        "sinfo", "--noheader", "--Node", "--partition=" + partition, "--format=%N %t"
    )
    usable = set()
    for line in listed.splitlines():
        node, _, node_state = line.partition(" ")
        if node not in left_out and not UNUSABLE_STATES.search(node_state):
            usable.add(node)
    return len(usable) >= count


# ------------------------------------------------------------------------------------------------ changing the job


def release_nodes(job: Job, kept: Sequence[str]) -> bool:
    """Gives all nodes of the job back to Slurm except `kept`. Returns whether Slurm accepted that.

    A job that is queued again while it has a lost node that Slurm does not know to be down is never
    started by Slurm 22.05 (BadConstraints). Slurm refuses to take back the node of the job's
    script, and without accounting it accepts only one change of the nodes.
    """
    return _update(job, {"NodeList": ",".join(kept)})


def _update(job: Job, fields: Dict[str, str]) -> bool:
    assignments = [f"{name}={value}" for name, value in fields.items()]
    update = ["scontrol", "update", "JobId=" + job.name, *assignments]
    # scontrol can write scripts to its working directory, so it runs in a temporary folder.
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            update,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
    return done.returncode == 0


def requeue_job(job: Job, left_out: Collection[str] = ()) -> bool:
    """Puts the job back into Slurm's queue. Slurm then ends this process. Returns whether Slurm
    accepted the request.

    left_out: nodes that the next start must not use, if the partition has enough other nodes. The
    number of nodes is also restored, because a job that has released nodes would start again with
    fewer.
    """
    for _ in range(MAX_ATTEMPTS):  # an overloaded controller can answer later
        now = query_state(job)
        if now in REQUEUED_STATES or now.startswith("REQUEUE"):
            return True
        if requeue(job.name):
            if left_out:
                _request_other_nodes(job, left_out)
            return True
        time.sleep(2)
    return False


def _request_other_nodes(job: Job, left_out: Collection[str]) -> None:
    count = len(job.nodes)
    wanted = {"NumNodes": str(count)}
    if has_other_nodes(count, left_out):
        excluded = re.search(r"\bExcNodeList=(\S+)", show_job(job))
        names = set(left_out)
        if excluded and excluded.group(1) != "(null)":
            names.update(host_names(excluded.group(1)))
        wanted["ExcNodeList"] = ",".join(sorted(names))
    for _ in range(MAX_ATTEMPTS):
        if _update(job, wanted):
            return
        time.sleep(0.5)


def requeue(name: str) -> bool:
    """Calls `scontrol requeue`. Returns whether it succeeded."""
    return os.system(f"scontrol requeue {name}") == 0


def warn_if_memory_is_limited(job: Job) -> None:
    """Prints a warning if Slurm assigned the job much less memory than its nodes have."""
    tracked = command_output("scontrol", "show", "config")
    if not re.search(r"SelectTypeParameters.*MEMORY", tracked):
        return  # Slurm does not limit the memory of jobs then
    given = re.search(r"\bTRES=\S*\bmem=(\d+)([MGT])", show_job(job))
    present = re.search(
        r"\bRealMemory=(\d+)", command_output("scontrol", "show", "node", job.nodes[0])
    )
    if not given or not present:
        return
    megabytes = int(given.group(1)) * {"M": 1, "G": 1 << 10, "T": 1 << 20}[given.group(2)]
    per_node = megabytes / len(job.nodes)
    if per_node < 0.9 * int(present.group(1)):
        print_line(
            f"warning: Slurm gives this job {per_node:,.0f} MB of the {int(present.group(1)):,} that {job.nodes[0]} has; use sbatch --mem=0 for all of it"
        )
