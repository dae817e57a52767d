"""Simulates Slurm's commands with containers like those of Pyxis, as far as 1.train.sbatch can observe.

Sources: pyxis_slurmstepd.c, args.c, pyxis_slurmd.c of Pyxis 0.20 and 0.24, runtime.sh of Enroot 4.1.
"""

import json
import os
import shutil
import subprocess
import sys
from types import SimpleNamespace

from tests.support.processes import write_program

# An image with 100 bytes according to its superblock.
SQUASHFS = b"hsqs" + bytes(36) + (100).to_bytes(8, "little") + bytes(52)
# The options of srun that the launcher and docs/image.md use; HyperPod adds auto-resume.
SLURM_OPTIONS = set(
    "auto-resume cpu-bind export gpus gpus-per-node immediate job-name kill-on-bad-exit label no-kill nodelist nodes "
    "ntasks ntasks-per-node overlap wait".split()
)
# The options that Pyxis adds, with the version that introduced each, according to its changelog.
PYXIS_OPTIONS = {
    "container-image": (0, 1),
    "container-mounts": (0, 1),
    "container-name": (0, 1),
    "container-workdir": (0, 1),
    "no-container-mount-home": (0, 3),
    "container-name=...:no_exec": (0, 14),
    "container-env": (0, 15),
}
OLDEST_PYXIS = (0, 19)  # the version that HyperPod has
# The simulated srun records its arguments, then runs the command for each node, one after the other. Slurm's commands
# do not exist in the container. Tests set these variables. BROKEN_NODES: nodes that start no container. PREFLIGHT: the
# exit code of a preflight, which is then not run. OUTCOMES: the outcomes of the trainings in order, as JSON; {} is the
# outcome of a training that is killed. AT: a part of the command during which the job gets the signal SIGNAL; the
# training then waits for the file STOP, unless OUTCOMES is [].
SRUN = f'''#!{sys.executable}
import itertools, json, os, signal, subprocess, sys, time
from pathlib import Path

words, state = sys.argv[1:], Path(os.environ["STATE"])
if words == ["--help"]:
    print("--container-image=...")
    sys.exit()
with open(os.environ["RECORD"], "a") as file:
    file.write(json.dumps(words) + "\\n")
options = list(itertools.takewhile(lambda word: word.startswith("--"), words))
command = words[len(options):]
given = dict(option[2:].split("=", 1) for option in options if "=" in option)
for option in options:
    if option[2:].split("=")[0] not in {SLURM_OPTIONS | PYXIS_OPTIONS.keys()}:
        sys.exit(f"srun: unrecognized option '{{option}}'")
nodes = given.get("nodelist", "node1").split(",")  # a command of a user can lack it
if "nodelist" in given:
    assert given["nodes"] == given["ntasks"] == str(len(nodes)), "as many as are named"
image, mounts = given.get("container-image"), [m.split(":")[0] for m in given.get("container-mounts", "").split(",")]

def refuse(node, text):
    print(f"{{node}}: pyxis: {{text}}", file=sys.stderr)
    return 1

def start_container(node):
    """Unpacks the image unless there is a container with this name. Returns an exit code."""
    if not image.startswith(("/", ".")):
        return refuse(node, f"importing docker image: {{image}}: no such image")
    name, _, flag = given.get("container-name", "").partition(":")
    assert flag in ("", "no_exec"), flag
    stem = "pyxis_77_" if os.environ["SCOPE"] == "job" else "pyxis_"
    place = state / node / (stem + name)
    if not (name and place.exists()):
        with open(state / "unpacked", "a") as file:
            file.write(node + "\\n")
        if node in os.environ.get("BROKEN_NODES", ""):
            return refuse(node, "failed to create container filesystem")
        if name:
            place.mkdir(parents=True)
    for mount in mounts:
        # Pyxis 0.24 escapes spaces as \\\\040, and 0.20 does not
        if not Path(mount).exists() or " " in mount or "\\\\" in mount:
            return refuse(node, f"--container-mounts: source path does not exist: {{mount}}")
    # Without the option container-env, the value of the image applies.
    devices = os.environ["NVIDIA_VISIBLE_DEVICES"] if "container-env" in given else "all"
    if devices != "void" and not Path("/proc/driver/nvidia").exists():
        return refuse(node, "[ERROR] Command not found: nvidia-container-cli")
    return 0

def run(node):
    environment = {{**os.environ, "SLURMD_NODENAME": node, "SLURM_NODEID": str(nodes.index(node))}}
    if not image:
        return subprocess.run(command, env=environment).returncode
    if code := start_container(node):
        return code
    environment["PATH"] = os.environ["IMAGE_PATH"]
    return subprocess.run(command, env=environment, cwd=given.get("container-workdir")).returncode

def train():
    """Returns the exit code of the next training in OUTCOMES."""
    with open(state / "trainings", "a") as file:
        file.write(Path(command[-1].removeprefix("--resolved=")).read_text())
    assert not image or max(map(start_container, nodes)) == 0
    (attempt,) = [word.partition("=")[2] for word in command if word.startswith("--rdzv-id=")]
    folder = Path(command[command.index("mamba_fsdp.launch.node") + 1], "starts", attempt)
    outcomes = json.loads(os.environ.get("OUTCOMES", '[{{"status": "finished"}}]'))
    while is_told and not (outcomes and (folder / "STOP").exists()):
        time.sleep(0.02)
        if os.getppid() != int(os.environ["JOB_PID"]):  # the job has ended, and Slurm ends its steps
            return 143
    count = (state / "trainings").read_text().count("\\n")
    outcome = outcomes[min(count, len(outcomes)) - 1]
    if not outcome:
        return 137
    (folder / "outcome.json").write_text(json.dumps(outcome))
    return outcome.get("code", 0)

is_told = os.environ.get("AT", "nowhere") in " ".join(command)
if is_told:
    os.kill(int(os.environ["JOB_PID"]), signal.Signals["SIG" + os.environ["SIGNAL"]])
if "mamba_fsdp.launch.node" in command:
    sys.exit(train())
if is_told:
    time.sleep(600)
if "preflight" in command and "PREFLIGHT" in os.environ:
    sys.exit(int(os.environ["PREFLIGHT"]))
if any(word.endswith("node_guard.py") for word in command):  # it runs simultaneously with other steps, and on all nodes
    command = ["127.0.0.1" if word == "node1" else word for word in command]
    here = {{node: {{**os.environ, "SLURMD_NODENAME": node}} for node in nodes}}
    guards = [subprocess.Popen(command, env=here[node]) for node in nodes]
    sys.exit(max(guard.wait() for guard in guards))
if "started:" in words[-1]:
    command = [*command[:-1], command[-1].replace("started:", "0: started:")]  # --label
sys.exit(max(run(node) for node in nodes))
'''
JOB = """#!/bin/bash
export SLURM_JOB_ID=77 SLURM_JOB_NODELIST="node[1-2]" SLURMD_NODENAME=node1 JOB_PID=$$
"""
# The simulated sbatch runs a copy of the script immediately.
SBATCH = (
    JOB
    + """
while [[ $1 == --* ]]; do shift; done
export COMMAND=$(realpath "$1")
cp "$COMMAND" "$STATE/slurm_script"
exec bash "$STATE/slurm_script" "${@:2}"
"""
)
SALLOC = (
    JOB
    + """
while [[ $1 == --* ]]; do shift; done
exec "$@"
"""
)
SCONTROL = """#!/bin/sh
case "$*" in
"show hostnames"*) printf "node1\\nnode2\\n" ;;
"show job 77")
    echo "   StartTime=${START_TIME:-2000-01-01T00:00:00} EndTime=${END_TIME:-2050-01-01T00:00:00}"
    echo "   Command=$COMMAND --some=words"
    ;;
requeue*) echo "requeued" ;;
esac
"""
SQUEUE = """#!/bin/sh
case "$*" in
*SUSPENDED*%A*) printf "77\\n78\\n79\\n" ;; # the last is suspended
*%A*) printf "77\\n78\\n" ;;
*) echo "${JOB_STATE:-RUNNING}" ;;
esac
"""
SINFO = """#!/bin/sh
echo "${LOST:-}"
"""
ENROOT = """#!/bin/sh
case $1 in
list) ls -1 "$STATE/$SLURMD_NODENAME" ;;
remove) rmdir "$STATE/$SLURMD_NODENAME/$3" ;;
esac
"""


def option(words, name):
    """Returns the value of the option --name=VALUE of srun. The option must occur exactly once."""
    (value,) = [word.split("=", 1)[1] for word in words if word.startswith(f"--{name}=")]
    return value


def mounted(words):
    """Returns the folders that an srun mounts in its container under their own names."""
    pairs = [mount.split(":") for mount in option(words, "container-mounts").split(",")]
    assert all(source == target for source, target in pairs)
    return [source for source, _ in pairs]


def make_cluster(folder, project):
    """Makes a cluster of node1 and node2 that runs job 77. Returns an object with these attributes:

    submit(*arguments, script=..., **environment) runs the script as a job. It returns (finished process, [the arguments
        of each srun], [the node of each unpacked image]).
    trainings() returns the resolved settings of each training.
    containers(node) returns the names of the containers on a node.
    environment: the variables with which a program finds the commands.
    image: the folder of the programs in a container.
    """
    commands, image = folder / "commands", folder / "image"
    for path in (folder / "state/node1", folder / "state/node2"):
        path.mkdir(parents=True)
    # python3 of the image is the Python of the project's .venv, because this environment has the stamp file of
    # 0.create_env.sh.
    write_program(image / "python3", f'#!/bin/sh\nexec "{project}/.venv/bin/python" "$@"\n')
    for name in ("bash", "env", "sh", "basename", "dirname", "readlink", "hostname"):
        (image / name).symlink_to(shutil.which(name))
    for name, text in (
        ("sbatch", SBATCH),
        ("salloc", SALLOC),
        ("srun", SRUN),
        ("scontrol", SCONTROL),
        ("squeue", SQUEUE),
        ("sinfo", SINFO),
        ("enroot", ENROOT),
    ):
        write_program(commands / name, text)

    def lines(path):
        return path.read_text().splitlines() if path.exists() else []

    everywhere = {
        **os.environ,
        "RECORD": str(folder / "record"),
        "STATE": str(folder / "state"),
        "SCOPE": "job",
        "IMAGE_PATH": str(image),
        "PATH": f"{commands}:{os.environ['PATH']}",
    }

    def submit(*words, script="1.train.sbatch", **environment):
        done = subprocess.run(
            [commands / "sbatch", project / script, *words],
            env={**everywhere, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=400,
        )
        return (
            done,
            [json.loads(line) for line in lines(folder / "record")],
            lines(folder / "state/unpacked"),
        )

    def trainings():
        return [json.loads(line) for line in lines(folder / "state/trainings")]

    def containers(node):
        return sorted(path.name for path in (folder / "state" / node).iterdir())

    return SimpleNamespace(
        submit=submit,
        trainings=trainings,
        containers=containers,
        folder=folder,
        environment=everywhere,
        image=image,
    )
