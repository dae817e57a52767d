"""Calls Slurm's commands. Each command is one function with a typed result. For the cluster's own Python, see host.py."""

import os
import re
import shutil
import subprocess
import tempfile
import time
from datetime import datetime
from typing import Collection, Dict, List, NamedTuple, Optional, Sequence, Set

from mamba_fsdp.launch.host import Mistake, answer_of, say

HYPERPOD_FOLDER = "/opt/sagemaker_cluster"  # exists on SageMaker HyperPod only
FIRST_PORT = 20000  # the first of the ports on which a job's launchers meet
PORTS = 10000
ENDING = ("PENDING", "COMPLETING")  # states of a job that Slurm has queued again already
TRIES_TO_REQUEUE = 5
TRIES_TO_UPDATE = 5
MAX_SLURMD_TIMEOUT = 600  # seconds; Slurm's default is 300
DEFAULT_SLURMD_PORT = 6818
GUARD_STEP = "mamba-guard"  # the name of the step of launch/node_guard.py
# Variables that describe the job, and those of its memory, which each step inherits. All other variables of Slurm's
# commands are options that somebody has set in a shell, such as SLURM_KILL_BAD_EXIT or SQUEUE_FORMAT.
JOB_VARIABLES = re.compile(
    "SLURM_(CONF|CLUSTER_NAME|JOB.*|NODELIST|STEP_?ID|ARRAY_.*|RESTART_COUNT|HET_SIZE|SUBMIT_.*|NODEID|PROCID|LOCALID"
    "|GPUS_ON_NODE|CPUS_ON_NODE|MEM_PER_.*|TASKS_PER_NODE)$"
)
OPTION_VARIABLES = re.compile("(SLURM|SRUN|SQUEUE|SINFO|SCONTROL|SCANCEL)_")
UNUSABLE_STATES = re.compile(r"down|drain|drng|fail|unk|err|maint|boot|inval|[*]")


class Job(NamedTuple):
    """The job that this process runs in."""

    number: str
    name: str  # NUMBER, or ARRAY_TASK: one task has the whole array's number
    restart: int  # how often Slurm has started it again
    nodes: List[str]  # host names; the first one runs this program

    @property
    def start(self) -> str:
        """Names this start of the job, as in 77.0."""
        return f"{self.number}.{self.restart}"


def ignore_options_of_the_shell() -> None:
    """Removes from the environment the variables that would change what Slurm's commands do or print."""
    for name in list(os.environ):
        if OPTION_VARIABLES.match(name) and not JOB_VARIABLES.match(name):
            del os.environ[name]


def is_in_job() -> bool:
    """Returns whether this process runs in a Slurm job."""
    return bool(os.environ.get("SLURM_JOB_ID"))


def has_salloc() -> bool:
    """Returns whether a job can be started from here."""
    return shutil.which("salloc") is not None


def this_job() -> Job:
    """Returns the job that this process runs in. Raises Mistake for a job that has ended, and for jobs whose nodes can't
    train together."""
    number = os.environ["SLURM_JOB_ID"]
    if os.environ.get("SLURM_HET_SIZE"):
        raise Mistake(
            "this is a heterogeneous job (sbatch ... : ...), whose parts can't train together; ask for "
            "nodes of one kind: sbatch --nodes=N"
        )
    name = number
    if os.environ.get("SLURM_ARRAY_TASK_ID"):
        name = "{SLURM_ARRAY_JOB_ID}_{SLURM_ARRAY_TASK_ID}".format(**os.environ)
    nodes = host_names(os.environ.get("SLURM_JOB_NODELIST", ""))
    if not nodes:
        raise Mistake(
            f"SLURM_JOB_ID={number} is set, but not by Slurm for this process: unset SLURM_JOB_ID, or sbatch this file"
        )
    restart = int(os.environ.get("SLURM_RESTART_COUNT") or 0)
    return Job(number, name, restart, nodes)


def host_names(node_list: str) -> List[str]:
    """Returns the nodes of a list as Slurm abbreviates it, such as node[1-2]."""
    return answer_of("scontrol", "show", "hostnames", node_list).split() if node_list else []


def check_gpus(job: Job) -> None:
    """Raises Mistake if Slurm has given the nodes different GPUs: a step can ask for one number only."""
    shown = answer_of("scontrol", "--details", "show", "job", job.name)
    assigned = re.findall(r"^ *Nodes=(\S+) .*GRES=(gpu:[^(\s]*)", shown, re.MULTILINE)
    if len({gpus for _, gpus in assigned}) > 1:
        listed = ", ".join(" ".join(pair) for pair in assigned)
        raise Mistake(
            f"the nodes have different GPUs ({listed}); choose one kind: --partition, --constraint, "
            "--exclude"
        )


def check_images_run(image: str) -> None:
    """Raises Mistake unless this Slurm starts steps in images, such as this one."""
    if "--container-image" not in answer_of("srun", "--help"):
        raise Mistake(
            "this Slurm runs no images, since its plugin Pyxis is not switched on: docs/image.md says how; "
            f"without an image: rename {image}, then ./0.create_env.sh"
        )


# ------------------------------------------------------------------------------------------------ steps


def on_nodes(nodes: Sequence[str]) -> List[str]:
    """Returns the srun that starts a command once on each of these nodes of the job."""
    srun = on_hosts(nodes) + ["--label"]
    # A step sees no GPU unless it asks, even where --exclusive gave the job all of them.
    gpus = os.environ.get("SLURM_GPUS_ON_NODE")
    if gpus:
        srun.append(f"--gpus-per-node={gpus}")
    if os.path.isdir(HYPERPOD_FOLDER):
        srun.append("--auto-resume=1")  # HyperPod replaces a broken node and starts this step again
    return srun


def on_hosts(nodes: Sequence[str]) -> List[str]:
    """Returns the srun that starts a command once on each of these nodes, without GPUs.

    --nodelist: the job's own variables still name a node that it has lost. --overlap: a step that a user holds open, and
    one that has not ended on a lost node, keep their nodes from steps that don't share them. --cpu-bind=none: Slurm would
    pin the node's only task, and all ranks in it, to one core."""
    count = len(nodes)
    srun = ["srun", f"--nodes={count}", f"--ntasks={count}", "--ntasks-per-node=1"]
    return [*srun, "--nodelist=" + ",".join(nodes), "--overlap", "--export=ALL", "--cpu-bind=none"]


def meeting_place(job: Job, first_node: str, attempt: int) -> str:
    """Returns where the launchers of all nodes meet. A host name, never an address: a replaced node keeps its name. Each
    attempt has a port of its own, since processes of the one before may not have ended."""
    return f"{first_node}:{FIRST_PORT + (int(job.number) + attempt) % PORTS}"


def kill_steps_on(job: Job, node: str) -> None:
    """Kills the steps of the job that use a lost node, on its other nodes, except the guards. Slurm may not know for
    minutes that the node is lost, and ranks may wait for it as long."""
    listed = answer_of("squeue", "--steps", "--noheader", "--jobs=" + job.name, "--format=%i %j %N")
    for line in listed.splitlines():
        step, name, nodes = (line.split() + ["", "", ""])[:3]
        if name != GUARD_STEP and node in host_names(nodes):
            # By the controller: scancel itself would wait ten seconds for the lost node.
            answer_of("scancel", "--ctld", "--signal=KILL", step)


# ------------------------------------------------------------------------------------------------ the job's state


def state(job: Job) -> str:
    """Returns the job's state, such as RUNNING. A busy controller does not answer: it is asked until it does."""
    while True:
        answer = answer_of("squeue", "--noheader", "--jobs=" + job.name, "--format=%T").split()
        if answer:
            return answer[0]
        time.sleep(2)


def jobs_of_this_user(states: str) -> Optional[Set[str]]:
    """Returns the numbers of this user's jobs in these states; None if a busy controller does not answer."""
    me = f"--user={os.getuid()}"
    answer = answer_of("squeue", "--noheader", me, "--states=" + states, "--format=%A")
    numbers = set(answer.split())
    return numbers or None  # this job at least is one of them


def seconds_left(job: Job) -> Optional[float]:
    """Returns the seconds until the job's time limit; None if it has none, or if a busy controller does
    not answer."""
    end = _time("EndTime", answer_of("scontrol", "show", "job", job.name))
    return None if end is None else end - time.time()


def seconds_run(job: Job) -> float:
    """Returns for how many seconds this start of the job has run; infinity if a busy controller does not
    answer."""
    start = _time("StartTime", answer_of("scontrol", "show", "job", job.name))
    return float("inf") if start is None else time.time() - start


def _time(name: str, shown: str) -> Optional[float]:
    found = re.search(rf"\b{name}=(\d+-\d+-\d+T\d+:\d+:\d+)", shown)
    if not found:
        return None
    return datetime.strptime(found.group(1), "%Y-%m-%dT%H:%M:%S").timestamp()


def nodes_down(nodes: Sequence[str]) -> List[str]:
    """Returns those of the nodes that Slurm knows to be down."""
    down = answer_of(
        "sinfo", "--noheader", "--nodes=" + ",".join(nodes), "--states=down", "--format=%n"
    )
    return [node for node in nodes if node in down.split()]


def await_down(nodes: Sequence[str]) -> None:
    """Returns once Slurm knows that the nodes are down. Before that it would give them to the job's next start."""
    end = time.monotonic() + MAX_SLURMD_TIMEOUT
    while time.monotonic() < end and set(nodes_down(nodes)) != set(nodes):
        time.sleep(5)


def slurmd_port() -> int:
    """Returns the port on which Slurm's daemon listens on each node."""
    found = re.search(
        r"^SlurmdPort\s*=\s*(\d+)", answer_of("scontrol", "show", "config"), re.MULTILINE
    )
    return int(found.group(1)) if found else DEFAULT_SLURMD_PORT


def has_other_nodes(count: int, left_out: Collection[str]) -> bool:
    """Returns whether the job's partition has so many nodes besides `left_out` that can run jobs."""
    partition = os.environ.get("SLURM_JOB_PARTITION", "")
    listed = answer_of(
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
    """Gives the job's other nodes than `kept` back to Slurm. Returns whether Slurm took them.

    Without it, Slurm kills the job's steps once it notices that a node is down, and a job that is queued again before
    that is held for good (BadConstraints, Slurm 22.05). Slurm refuses to take the node of the job's script."""
    with tempfile.TemporaryDirectory() as folder:  # scontrol writes two scripts where it runs
        return _update(job, {"NodeList": ",".join(kept)}, folder)


def _update(job: Job, fields: Dict[str, str], folder: Optional[str] = None) -> bool:
    words = [f"{name}={value}" for name, value in fields.items()]
    update = ["scontrol", "update", "JobId=" + job.name, *words]
    done = subprocess.run(
        update,
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    return done.returncode == 0


def queue_again(job: Job, left_out: Collection[str] = ()) -> bool:
    """Puts the job back into Slurm's queue, after which Slurm ends this process. Returns whether Slurm took it.

    left_out: nodes that the next start must not get, if the partition has enough others. A job that has released nodes
    would start again with fewer: its number of nodes is restored."""
    for _ in range(TRIES_TO_REQUEUE):  # a busy controller may answer later
        now = state(job)
        if now in ENDING or now.startswith("REQUEUE"):
            return True
        if requeue(job.name):
            if left_out:
                _ask_for_other_nodes(job, left_out)
            return True
        time.sleep(2)
    return False


def _ask_for_other_nodes(job: Job, left_out: Collection[str]) -> None:
    count = len(job.nodes)
    wanted = {"NumNodes": str(count)}
    if has_other_nodes(count, left_out):
        shown = answer_of("scontrol", "show", "job", job.name)
        excluded = re.search(r"\bExcNodeList=(\S+)", shown)
        names = set(left_out)
        if excluded and excluded.group(1) != "(null)":
            names.update(host_names(excluded.group(1)))
        wanted["ExcNodeList"] = ",".join(sorted(names))
    for _ in range(TRIES_TO_UPDATE):
        if _update(job, wanted):
            return
        time.sleep(0.5)


def requeue(name: str) -> bool:
    """Returns whether Slurm has taken the job back into its queue."""
    return os.system(f"scontrol requeue {name}") == 0


def warn_of_little_memory(job: Job) -> None:
    """Prints a warning if Slurm gives the job much less memory than its nodes have."""
    tracked = answer_of("scontrol", "show", "config")
    if not re.search(r"SelectTypeParameters.*MEMORY", tracked):
        return  # then Slurm limits nobody's memory
    given = re.search(
        r"\bTRES=\S*\bmem=(\d+)([MGT])", answer_of("scontrol", "show", "job", job.name)
    )
    has = re.search(r"\bRealMemory=(\d+)", answer_of("scontrol", "show", "node", job.nodes[0]))
    if not given or not has:
        return
    megabytes = int(given.group(1)) * {"M": 1, "G": 1 << 10, "T": 1 << 20}[given.group(2)]
    of_each = megabytes / len(job.nodes)
    if of_each < 0.9 * int(has.group(1)):
        say(
            f"warning: Slurm gives this job {of_each:,.0f} MB of the {int(has.group(1)):,} that {job.nodes[0]} has; sbatch --mem=0 takes all"
        )
