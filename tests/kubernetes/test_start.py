"""Tests the command of kubernetes/trainjob.yaml. Processes of this machine replace the nodes, with one rank each and
with the variables that Trainer 2.3 sets for its policy `torch`."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kubernetes import manifests
from tests.support.corpora import write_store
from tests.support.ports import hold_port
from tests.support.processes import finish, wait_until
from tests.support.tiny import TINY, format_arguments

pytestmark = pytest.mark.torch22
GRACE_SECONDS = manifests.node_job()["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]


@pytest.fixture
def start_nodes(tmp_path, project):
    """Returns a function start_nodes(*settings, nodes=2) that starts the nodes, and returns their processes. tmp_path
    replaces /fsx of the manifest."""
    write_store(tmp_path / "data/mine", [range(1, 60)] * 99, vocab_size=64, eos=0, tokenizer="none")
    started = []
    port = hold_port()

    def start_node(number, nodes, settings):
        command, environment = manifests.node_of_trainjob()
        environment |= {
            "PET_NNODES": str(nodes),
            "PET_NODE_RANK": str(number),
            "PET_NPROC_PER_NODE": "1",
            "PET_MASTER_ADDR": "localhost",
            "PET_MASTER_PORT": str(port.getsockname()[1]),
        }
        words = [*manifests.expanded(command, environment), *settings]
        return subprocess.Popen(
            [word.replace("/fsx", str(tmp_path)) for word in words],
            cwd=project,
            env={
                **os.environ,
                **environment,
                "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin",
            },
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )

    def start(*settings, nodes=2):
        words = format_arguments(TINY | {"checkpoint_interval": 10**6, "global_batch_size": 4})
        now = [start_node(number, nodes, [*words, *settings]) for number in range(nodes)]
        started.extend(now)
        return now

    yield start
    port.close()
    for process in started:
        process.kill()


@pytest.mark.slow
def test_nodes_train_and_stop_with_a_checkpoint_and_resume(start_nodes, tmp_path):
    """If one node is drained, all nodes stop with a checkpoint, and none with exit code 0, because a PyTorchJob would
    then count as complete. Started again, the training resumes; a node returns 0 if it finishes, and 2 after a user
    error."""
    nodes = start_nodes("--num_steps=1000000")
    metrics = tmp_path / "runs/mine/metrics.jsonl"
    wait_until(lambda: metrics.exists() and metrics.read_text().count("\n") > 2)
    nodes[1].send_signal(signal.SIGTERM)
    codes = [node.wait(timeout=GRACE_SECONDS) for node in nodes]
    assert codes == [143, 143], nodes[0].stdout.read()
    (commit,) = (tmp_path / "runs/mine/checkpoints").glob("*/COMMIT")
    step = int(commit.parent.name.removeprefix("step_"))

    # The run can resume on fewer nodes. A file STOP from before the start is ignored.
    (tmp_path / "runs/mine/STOP").touch()
    (process,) = start_nodes(f"--num_steps={step + 2}", nodes=1)
    code, output = finish(process)
    assert code == 0, output
    assert f"step {step}\n" in output.partition("resumes    from")[2] and "finished " in output

    (process,) = start_nodes("--num_steps=ten", nodes=1)
    code, output = finish(process)
    assert code == 2 and output.splitlines()[-1].startswith("error: num_steps=ten"), output
    assert list(tmp_path.glob("runs/mine/starts/none/*.json")), "for the other nodes"
