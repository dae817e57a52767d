"""Tests that importing the package and training restore the state of the calling process."""

import json
import sys

import pytest

from tests.support.processes import run_program
from tests.support.tiny import TINY

# The program uses a large tensor, whose computation torch divides among its threads.
PROGRAM = """
import json, logging, os, resource, signal, sys, threading

import torch


def hooks():
    handlers = [str(signal.getsignal(number)) for number in range(1, signal.NSIG)]
    return handlers, str(sys.excepthook), sys.path[:]


before_import = hooks()
import mamba_fsdp
import mamba_fsdp.ops.triton  # sets a default of Triton's as soon as it is imported

for name in dir(mamba_fsdp):
    getattr(mamba_fsdp, name)
assert hooks() == before_import
words = json.loads(sys.argv[1])
large = torch.full((1 << 20,), 1e-310, dtype=torch.float64)


def state():
    return {
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "only warns": torch.is_deterministic_algorithms_warn_only_enabled(),
        "fills": torch.utils.deterministic.fill_uninitialized_memory,
        "flash": torch.backends.cuda.flash_sdp_enabled(),
        "denormals": int((large * 0.5 != 0).sum()),
        "threads": torch.get_num_threads(),
        "running": sorted(thread.name for thread in threading.enumerate()),
        "draws": torch.get_rng_state().tolist(),
        "group": torch.distributed.is_initialized(),
        "hooks": hooks(),
        "blocked": str(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
        "outputs": [str(sys.stdout), str(sys.stderr)],
        "logging": [logging.root.level, str(logging.root.handlers), logging.root.manager.disable],
        "files": resource.getrlimit(resource.RLIMIT_NOFILE),
        "folder": os.getcwd(),
        "environment": dict(os.environ),
    }


before = state()
after = []
for steps in (1, 2):
    mamba_fsdp.train(deterministic=True, num_steps=steps, **words)
    after.append(state())
try:
    mamba_fsdp.train(deterministic=True, **{**words, "d_model": 32})
except Exception as error:
    assert "another model" in str(error), error
    after.append(state())
for found in after:
    changed = {name: (before[name], found[name]) for name in before if found[name] != before[name]}
    print("changed", json.dumps(changed))
"""


@pytest.mark.torch22
def test_the_import_and_a_training_leave_the_process_as_it_was(project, corpus, tmp_path):
    """A process has the same signal handlers, random state, threads, environment and other settings before and after
    it imports the package, trains twice, and makes a mistake. Torch has already started two threads."""
    words = {**TINY, "dataset_path": str(corpus), "save_ckpt_path": str(tmp_path / "run")}
    del words["num_steps"]
    environment = {"OMP_NUM_THREADS": "2"}
    done = run_program(sys.executable, "-c", PROGRAM, json.dumps(words), cwd=project, **environment)
    assert done.returncode == 0, done.stderr
    changed = [line for line in done.stdout.splitlines() if line.startswith("changed")]
    assert changed == ["changed {}"] * 3
