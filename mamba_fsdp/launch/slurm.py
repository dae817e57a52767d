"""What the job asks of Slurm: each command is one function, with a typed result. For the cluster's own
Python, see host.py."""

import os
import re
import shutil
import time
from datetime import datetime
from typing import List, NamedTuple, Optional, Set

from mamba_fsdp.launch.host import Mistake, answer_of, say

HYPERPOD_FOLDER = "/opt/sagemaker_cluster"  # there on SageMaker HyperPod only
FIRST_PORT = 20000  # the first of those on which a job's launchers meet
PORTS = 10000
ENDING = ("PENDING", "COMPLETING")  # states of a job that Slurm has queued again already
TRIES_TO_REQUEUE = 5
# A step that a user holds open, such as `srun --pty bash`, keeps the node from other steps unless these share it. Slurm's
# own steps, for the script and for salloc's shell, have numbers above this one.
LAST_STEP_OF_A_USER = 0xFFFFFFF0


class Job(NamedTuple):
    """The job that this process runs in."""

    number: str
    name: str  # NUMBER, or ARRAY_TASK: one task has the whole array's number
    restart: int  # how often Slurm has started it again
    nodes: List[str]  # host names; the first runs this program

    @property
    def start(self) -> str:
        """Names this start of the job, as in 77.0."""
        return f"{self.number}.{self.restart}"


def is_in_job() -> bool:
    """Returns whether this process runs in a Slurm job."""
    return bool(os.environ.get("SLURM_JOB_ID"))


def has_salloc() -> bool:
    """Returns whether a job can be started from here."""
    return shutil.which("salloc") is not None


def this_job() -> Job:
    """Returns the job that this process runs in. Raises Mistake for jobs whose nodes can't train together."""
    number = os.environ["SLURM_JOB_ID"]
    if os.environ.get("SLURM_HET_SIZE"):
        raise Mistake(
            "this is a heterogeneous job (sbatch ... : ...), whose parts can't train together; ask for "
            "nodes of one kind: sbatch --nodes=N"
        )
    name = number
    if os.environ.get("SLURM_ARRAY_TASK_ID"):
        name = "{SLURM_ARRAY_JOB_ID}_{SLURM_ARRAY_TASK_ID}".format(**os.environ)
    listed = answer_of("scontrol", "show", "hostnames", os.environ.get("SLURM_JOB_NODELIST", ""))
    restart = int(os.environ.get("SLURM_RESTART_COUNT") or 0)
    return Job(number, name, restart, listed.split())


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


def on_all_nodes(job: Job) -> List[str]:
    """Returns the srun that starts a command once on each node of the job."""
    count = len(job.nodes)
    srun = _srun(count) + ["--ntasks-per-node=1", "--label"]
    # A step sees no GPU unless it asks, even where --exclusive gave the job all of them.
    gpus = os.environ.get("SLURM_GPUS_ON_NODE")
    if gpus:
        srun.append(f"--gpus-per-node={gpus}")
    if os.path.isdir(HYPERPOD_FOLDER):
        srun.append("--auto-resume=1")  # HyperPod replaces a broken node and starts this step again
    return srun


def on_first_node(job: Job) -> List[str]:
    """Returns the srun that starts a command on the job's first node."""
    return _srun(1) + [f"--nodelist={job.nodes[0]}"]


def beside_all(job: Job) -> List[str]:
    """Returns the srun that starts a command on each node beside the job's other steps."""
    return _srun(len(job.nodes), overlap=True) + ["--ntasks-per-node=1"]


def _srun(count: int, overlap: bool = False) -> List[str]:
    # --cpu-bind=none: Slurm would pin the node's only task, and all ranks in it, to one core.
    srun = ["srun", f"--nodes={count}", f"--ntasks={count}"]
    srun += ["--export=ALL", "--cpu-bind=none"]
    own_step = os.environ.get("SLURM_STEP_ID", "")
    if overlap or (own_step.isdigit() and int(own_step) < LAST_STEP_OF_A_USER):
        srun.append("--overlap")
    return srun


def meeting_place(job: Job) -> str:
    """Returns where the launchers of all nodes meet. A host name, never an address: a replaced node keeps
    its name."""
    return f"{job.nodes[0]}:{FIRST_PORT + int(job.number) % PORTS}"


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


def lost_nodes() -> str:
    """Returns the nodes of this job that Slurm has lost, as in `node1, node2`; "" if it has lost none."""
    nodes = "--nodes=" + os.environ.get("SLURM_JOB_NODELIST", "")
    down = answer_of("sinfo", "--noheader", nodes, "--states=down", "--format=%n")
    return ", ".join(down.split())


def queue_again(job: Job) -> bool:
    """Puts the job back into Slurm's queue, after which Slurm ends this process. Returns whether Slurm took it."""
    for _ in range(TRIES_TO_REQUEUE):  # a busy controller may answer later
        now = state(job)
        if now in ENDING or now.startswith("REQUEUE"):
            return True
        if requeue(job.name):
            return True
        time.sleep(2)
    return False


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
