"""Runs a real Slurm of several nodes on one machine: a slurmctld, and a slurmd for each node in its own namespaces.

A node has its own processes, host name, network (10.66.0.N, with a bridge that is not connected to other networks) and
/tmp. It shares all other folders with the machine, so any folder outside /tmp acts as a shared file system. Folders
below /tmp are also shared if they are `folder` or in `shared`.
"""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path

from tests.support.processes import PATIENCE_SECONDS

PROGRAMS = "slurmctld slurmd sbatch srun ip unshare nsenter setpriv".split()
REMEDY = "apt-get install --no-install-recommends slurmctld slurmd slurm-client iproute2"
UNSHARE = "unshare --net --uts --mount --pid --fork --kill-child=KILL"
# A bridge without a fixed MAC address uses the address of one of its ports. If the node of this port is switched off,
# the address changes, and the other nodes can't reach the controller for up to a minute.
BRIDGE_ADDRESS = "02:00:00:00:00:01"
ENDS = "COMPLETED FAILED CANCELLED TIMEOUT NODE_FAIL PREEMPTED"


def missing():
    """Returns the reason why this machine can't run a cluster, or ""."""
    absent = [program for program in PROGRAMS if not shutil.which(program)]
    if absent:
        return f"no {', '.join(absent)}: {REMEDY}"
    return "" if os.geteuid() == 0 else "a Slurm in namespaces needs root"


class Cluster:
    """A cluster, to be used as a context manager. Nodes are called node1, node2, ...

    gpus: the numbers of fake GPUs that Slurm finds on the nodes, one number for each node. The default partition
    contains the nodes without GPUs.
    """

    def __init__(self, folder, gpus=(0, 0), shared=(), extra_config=""):
        self.folder = Path(folder)
        self.shared = [str(path) for path in (folder, *shared)]
        self.names = [f"node{i}" for i in range(1, len(gpus) + 1)]
        for name in ("etc", "log", "state"):
            (self.folder / name).mkdir(parents=True)
        self._write_config(gpus, extra_config)
        self.inits = {}  # {machine: pid of its first process, as seen outside of its namespace}

    def __enter__(self):
        try:
            self._start_login()
            for name in self.names:
                self.start_node(name)
            self.wait_until(lambda: self.idle_nodes() == len(self.names), "all nodes are idle")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        # The process namespace of the login machine contains all nodes, so the nodes end with it.
        if "login" in self.inits:
            _kill(self.inits["login"])

    def _write_config(self, gpus, extra):
        etc = self.folder / "etc"
        for i in range(max(gpus)):  # Slurm requires a character device
            (self.folder / f"gpu{i}").symlink_to("/dev/null")
        offers = ""
        node_lines = ""
        for name, count in zip(self.names, gpus):
            node_lines += f"NodeName={name} CPUs=4 RealMemory=8000"
            if count:
                offers += f"NodeName={name} Name=gpu File={self.folder}/gpu[0-{count - 1}]\n"
                node_lines += f" Gres=gpu:{count}"
            node_lines += "\n"
        (etc / "gres.conf").write_text(offers)
        plain = ",".join(name for name, count in zip(self.names, gpus) if not count)
        hosts = "".join(f"10.66.0.{i} {name}\n" for i, name in enumerate(self.names, 1))
        (self.folder / "hosts").write_text(f"127.0.0.1 localhost\n10.66.0.254 login\n{hosts}")
        (etc / "slurm.conf").write_text(f"""ClusterName=test
SlurmctldHost=login(10.66.0.254)
SlurmUser=root
AuthType=auth/none
CredType=cred/none
AuthInfo=cred_expire=100
StateSaveLocation={self.folder}/state
SlurmdSpoolDir=/tmp/spool-%n
SlurmctldPidFile={self.folder}/slurmctld.pid
SlurmdPidFile={self.folder}/slurmd-%n.pid
SlurmctldLogFile={self.folder}/log/slurmctld.log
SlurmdLogFile={self.folder}/log/%n.log
MailProg=/bin/true
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
GresTypes=gpu
ReturnToService=2
SlurmdTimeout={PATIENCE_SECONDS}
# After a request to end, a job has enough time even on a slow machine.
KillWait={PATIENCE_SECONDS}
# Longer time limits than Slurm's defaults, for slow machines: ten seconds for a message, ...
MessageTimeout=60
# ... ten seconds for the start of a job's script, a minute for the end of a killed process, ...
BatchStartTimeout={PATIENCE_SECONDS}
UnkillableStepTimeout={PATIENCE_SECONDS}
# ... and five minutes until Slurm forgets a job that has ended.
MinJobAge=86400
SchedulerParameters=batch_sched_delay=0,sched_interval=1,bf_interval=1
SlurmdParameters=config_overrides
PropagateResourceLimits=NONE
{node_lines}
PartitionName=main Nodes={plain} Default=YES MaxTime=INFINITE State=UP
{extra}
""")
        version = subprocess.run(["slurmd", "-V"], capture_output=True, text=True).stdout
        if int(re.search(r"(\d+)\.", version)[1]) >= 23:
            (etc / "cgroup.conf").write_text("CgroupPlugin=disabled\n")

    def _start_login(self):
        script = f"""hostname login
mount --bind {self.folder}/hosts /etc/hosts && mkdir -p /etc/slurm && mount --bind {self.folder}/etc /etc/slurm
ip link set lo up && ip link add bridge address {BRIDGE_ADDRESS} type bridge && ip addr add 10.66.0.254/24 dev bridge && ip link set bridge up
slurmctld -D & while :; do sleep 3600 & wait; done"""
        # SIGKILL is used, so that the cluster always ends with the tests
        self._start("login", ["setpriv", "--pdeathsig", "KILL"], script)
        self.wait_until(
            lambda: "UP" in self.run("scontrol", "ping", check=False), "slurmctld answers"
        )

    def start_node(self, name):
        """Switches a node on, at the beginning or after kill_node."""
        number = self.names.index(name) + 1
        binds = "".join(
            f"mkdir -p $t/{path[5:]} && mount --bind {path} $t/{path[5:]}\n"
            for path in self.shared
            if path.startswith("/tmp/")
        )
        script = f"""set -e
hostname {name}; ip link set lo up
until ip link show eth0 >/dev/null 2>&1; do sleep .01; done
ip addr add 10.66.0.{number}/24 dev eth0; ip link set eth0 up
t=$(mktemp -d); mount -t tmpfs -o mode=1777 tmp $t
{binds}mount --move $t /tmp
# the node's own name has the address 127.0.1.1, as on Debian
sed 's/^[0-9.]* {name}$/127.0.1.1 {name}/' /etc/hosts > /tmp/hosts && mount --bind /tmp/hosts /etc/hosts
mkdir -p /tmp/spool-{name}  # in the node's own /tmp, because the path of the socket in it must be short
slurmd -D -N {name} & while :; do sleep 3600 & wait; done"""
        login = str(self.inits["login"])
        self._start(name, ["nsenter", "-t", login, "-m", "-p", "--"], script)
        ip = ["nsenter", "-t", login, "-n", "ip", "link"]
        subprocess.run([*ip, "del", f"to-{name}"], capture_output=True)
        peer = ["peer", "name", "eth0", "netns", str(self.inits[name])]
        subprocess.run([*ip, "add", f"to-{name}", "type", "veth", *peer], check=True)
        subprocess.run([*ip, "set", f"to-{name}", "master", "bridge", "up"], check=True)

    def _start(self, machine, enter, script):
        mount_proc = "mount -t proc proc /proc\n"
        with open(self.folder / "log" / f"{machine}.out", "a") as log:
            process = subprocess.Popen(
                [*enter, *UNSHARE.split(), "bash", "-c", mount_proc + script],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self.inits[machine] = _first_process_of_namespace(process)

    def kill_node(self, name):
        """Simulates a power failure: processes and network vanish without notice. Then tells Slurm that the node is
        down.

        Slurm would detect that by itself only with a short SlurmdTimeout, with which a slow node would also count as
        lost.
        """
        self.cut_power(name)
        self.set_down(name)

    def set_down(self, name):
        self.run("scontrol", "update", f"nodename={name}", "state=down", "reason=lost")

    def cut_power(self, name):
        """Simulates a power failure that Slurm does not notice."""
        _kill(self.inits.pop(name))

    def set_link(self, name, state):
        """Disconnects (`down`) or reconnects (`up`) the network of a node. Its processes continue."""
        ip = ["nsenter", "-t", str(self.inits["login"]), "-n", "ip", "link", "set", f"to-{name}"]
        subprocess.run([*ip, state], check=True)

    def reset(self):
        """Ends all jobs, and switches lost nodes on again."""
        for name in self.inits.keys() - {"login"}:
            self.set_link(name, "up")
        self.run("scancel", "--full", "--signal=KILL", "--user=root", check=False)
        self.run("scancel", "--user=root", check=False)
        self.run(
            "scontrol", "update", f"nodename={','.join(self.names)}", "state=resume", check=False
        )
        for name in self.names:
            if name not in self.inits:
                self.start_node(name)
        self.wait_until(lambda: self.idle_nodes() == len(self.names), "all nodes are idle")

    def command(self, *words, on="login", cwd=None):
        enter = f"nsenter -t {self.inits[on]} -n -u -m -p".split()
        return [*enter, f"--wd={cwd or os.getcwd()}", "--", *map(str, words)]

    def run(self, *words, cwd=None, env=None, check=True):
        """Runs a command on the login node. Returns its output."""
        done = subprocess.run(
            self.command(*words, cwd=cwd),
            env={**os.environ, **(env or {})},
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        assert not check or done.returncode == 0, done.stdout
        return done.stdout

    def submit(self, project, *words, options=(), env=None):
        """Submits the project's launcher with sbatch. Returns the job's id."""
        output = self.run(
            "sbatch", "--parsable", *options, "1.train.sbatch", *words, cwd=project, env=env
        )
        return output.strip().split("\n")[-1]

    def idle_nodes(self):
        return int(self.run("sinfo", "-h", "-t", "idle", "-o", "%D", check=False).strip() or 0)

    def state(self, job):
        """Returns the state of the job in scontrol: PENDING, RUNNING, COMPLETED, FAILED, CANCELLED,
        ...
        """
        return self.fact("JobState", job)

    def restarts(self, job):
        return int(self.fact("Restarts", job))

    def fact(self, name, job):
        """Returns a field of scontrol. The query is repeated if an overloaded controller does not
        answer.
        """

        def ask():
            return re.search(
                rf"{name}=(\w+)", self.run("scontrol", "show", "job", job, check=False)
            )

        return self.wait_until(ask, f"{name} of job {job} is told")[1]

    def wait_for_end(self, job):
        """Returns the final state of the job. If the job is queued again, it is started immediately."""

        def ended():
            state = self.state(job)
            if state == "PENDING":
                self.release(job)
            return state if state in ENDS.split() else ""

        return self.wait_until(ended, f"job {job} ends")

    def release(self, job):
        """Starts a job immediately if it has been queued again. Slurm would delay the start by two minutes."""
        if self.restarts(job) and self.state(job) == "PENDING":
            # Within the same second, nodes would confuse the new start with the one that has just ended.
            time.sleep(2)
            self.run("scontrol", "update", f"jobid={job}", "StartTime=now", check=False)

    def wait_until(self, happened, what):
        """Calls happened() until it returns a true value, and returns this value.

        Raises TimeoutError with `what` and the last log lines of the daemons.
        """
        end = time.monotonic() + PATIENCE_SECONDS
        while time.monotonic() < end:
            if value := happened():
                return value
            time.sleep(0.1)
        logs = "".join(
            f"--- {path.name}\n{path.read_text(errors='replace')[-1500:]}\n"
            for path in sorted((self.folder / "log").iterdir())
        )
        raise TimeoutError(f"{PATIENCE_SECONDS} s passed before {what}\n{logs}")


def _first_process_of_namespace(process):
    """Returns the pid, outside of the namespace, of process 1 in the namespace that `process` creates."""
    end = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < end:
        with contextlib.suppress(OSError, IndexError):
            pid = process.pid
            while True:
                status = Path(f"/proc/{pid}/status").read_text()
                inner = re.search(r"NSpid:\t(.*)", status)[1].split()
                if (
                    len(inner) > 1
                    and inner[-1] == "1"
                    and Path(f"/proc/{pid}/comm").read_text().strip() == "bash"
                ):
                    return pid
                pid = int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])
        assert process.poll() is None, (
            "can't make a namespace; is this a container without the permission?"
        )
        time.sleep(0.01)
    raise TimeoutError("no process appeared in the namespace")


def _kill(pid):
    os.kill(pid, signal.SIGKILL)
    while Path(f"/proc/{pid}").exists():
        with contextlib.suppress(ChildProcessError):
            os.waitpid(-1, os.WNOHANG)
        time.sleep(0.02)
