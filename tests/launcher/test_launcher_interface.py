"""Two nodes whose own names are 127.0.1.1 to themselves, as Debian and Ubuntu write it into /etc/hosts, train together.

Each node has a network, a host name, an /etc/hosts and processes of its own; nothing of them is left behind.
"""

import os
import shutil
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest

from mamba_fsdp.data.store import StoreWriter
from tests.support.projects import make_project, make_venv

NAMESPACES = ["unshare", "--net", "--uts", "--mount", "--pid", "--fork", "--kill-child=KILL"]
BOOT = """set -e
mount -t proc proc /proc; mount --bind hosts-$0 /etc/hosts; hostname node$0; ip link set lo up
until ip link show eth0 > /dev/null 2>&1; do sleep .01; done
ip addr add 10.66.1.$0/24 dev eth0; ip link set eth0 up
exec "$@"
"""
SETTINGS = [
    "--d_model=32",
    "--n_layer=1",
    "--vocab_size=64",
    "--d_state=4",
    "--seq_length=64",
    "--batch_size=2",
    "--num_steps=2",
    "--report_interval=1",
    "--eval_interval=0",
    "--mixed_precision=fp32",
    "--dataset_path=data/store",
    "--save_ckpt_path=run",
]
CLEAN = {
    name: value
    for name, value in os.environ.items()
    if not name.startswith(("SLURM", "GLOO_", "NCCL_")) and name != "CUDA_VISIBLE_DEVICES"
}

pytestmark = [pytest.mark.torch22, pytest.mark.slow]


@pytest.fixture
def start_nodes(tmp_path):
    """start_nodes(command, **environment) -> [process on node1, process on node2], in a project with a token store."""
    missing = [program for program in ("ip", "unshare") if not shutil.which(program)]
    if missing:
        pytest.skip(
            f"no {', '.join(missing)}: apt-get install --no-install-recommends iproute2 util-linux"
        )
    tried = subprocess.run(
        [*NAMESPACES, "ip", "link", "set", "lo", "up"], capture_output=True, text=True
    )
    if tried.returncode:
        pytest.skip(f"no network namespaces can be made here: {tried.stderr.strip()}")
    project, nodes = make_project(tmp_path / "project", training=None), []
    make_venv(project)
    random = np.random.default_rng(0)
    writer = StoreWriter(project / "data/store", vocab_size=64, eos=0, tokenizer="none")
    for _ in range(20):
        writer.append([*random.integers(1, 64, size=100).tolist(), writer.eos])
    writer.finish()

    def start(command, **environment):
        for number, other in ((1, 2), (2, 1)):
            (project / f"hosts-{number}").write_text(
                f"127.0.0.1 localhost\n127.0.1.1 node{number}\n10.66.1.{other} node{other}\n"
            )
            nodes.append(
                subprocess.Popen(
                    [*NAMESPACES, "bash", "-c", BOOT, str(number), *command],
                    cwd=project,
                    env={**CLEAN, **environment},
                    text=True,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                )
            )
        first, second = (inner_process(node) for node in nodes)
        subprocess.run(
            [
                "ip",
                "link",
                "add",
                "eth0",
                "netns",
                first,
                "type",
                "veth",
                "peer",
                "name",
                "eth0",
                "netns",
                second,
            ],
            check=True,
        )
        return nodes

    yield start
    for node in nodes:
        node.kill()


def inner_process(node):
    """The id, out here, of the process that runs in the namespaces which `node` makes."""
    while not (children := Path(f"/proc/{node.pid}/task/{node.pid}/children").read_text().split()):
        assert node.poll() is None
        time.sleep(0.01)
    return children[0]


def test_two_nodes_train_two_steps_together(start_nodes):
    launcher = [
        ".venv/bin/python",
        "-m",
        "mamba_fsdp.launch.node",
        "failures",
        "--nnodes=2",
        "--rdzv-backend=c10d",
        "--rdzv-id=1",
        "--rdzv-endpoint=node1:29400",
        "--rdzv-conf=join_timeout=900,read_timeout=900",
        "training.py",
        *SETTINGS,
    ]
    nodes = start_nodes(launcher, LAST_NODE="node2", OMP_NUM_THREADS="1")
    outputs = [node.communicate(timeout=400)[0] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], "\n".join(outputs)
    assert "2 x cpu" in outputs[0]
    assert "finished   2 steps" in outputs[0]
