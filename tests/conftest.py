"""Provides the fixtures that all tests share."""

import os
import random
import signal
import sys
from pathlib import Path

import hypothesis
import numpy as np
import pytest

from tests.support.golden import GoldenFiles
from tests.support.terminal import Terminal
from tests.support.tiny import TINY, resolved

PROJECT = Path(__file__).resolve().parent.parent
# Test runs are deterministic, even on a busy machine. HYPOTHESIS_PROFILE=random tries other examples.
hypothesis.settings.register_profile(
    "random", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.register_profile(
    "equal", hypothesis.settings.get_profile("random"), derandomize=True
)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "equal"))
# Variables of a job, a launcher or a terminal in which the tests run. They must not affect the tests.
OUTER_PREFIXES = ("SLURM_", "SBATCH_", "SRUN_", "TORCHELASTIC_", "WANDB_")
OUTER_VARIABLES = {
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "COLUMNS",
    "LINES",
    "TEST_RECORDS",
    "COMMAND_BEGAN",
}


def pytest_addoption(parser):
    parser.addoption(
        "--renew",
        action="store_true",
        help="rewrite the golden files that the selected tests compare with",
    )


def pytest_configure():
    """Prepares the process: restores the default handling of signals, and removes the environment variables that could
    affect the tests.

    A shell starts background processes (`tests/run.sh &`) with SIGINT ignored, and nohup ignores SIGHUP. The programs
    that the tests start would inherit that.
    """
    for number, usual in (
        (signal.SIGINT, signal.default_int_handler),
        (signal.SIGHUP, signal.SIG_DFL),
        (signal.SIGQUIT, signal.SIG_DFL),
    ):
        if signal.getsignal(number) == signal.SIG_IGN:
            signal.signal(number, usual)
    for name in list(os.environ):
        if name.startswith(OUTER_PREFIXES) or name in OUTER_VARIABLES:
            del os.environ[name]
    os.environ["TERM"] = "xterm"
    # With more threads per rank, the threads of many ranks would spin and slow each other down.
    os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(autouse=True)
def seeded():
    """Seeds the random generators, so that unseeded random values do not depend on earlier tests."""
    random.seed(0)
    np.random.seed(0)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)


# The longest tests begin first, so that no worker is still busy with one while the others are idle.
LONGEST_FIRST = [
    "tests/container/test_image.py",
    "tests/readme/",
    "tests/user/",
    "tests/slurm/",
    "tests/launch/",
    "tests/storm/test_storm.py",
    "tests/env/",
    "tests/kernels/test_compiled.py",
    "tests/kernels/test_triton_mixers.py",
]


def collection_order(item):
    file = "/".join(item.path.parts[-3:])  # the path of the checkout can contain links
    for place, start in enumerate(LONGEST_FIRST):
        if file.startswith(start):
            return place
    return len(LONGEST_FIRST)


def pytest_collection_modifyitems(items):
    items.sort(key=collection_order)


@pytest.fixture(scope="session")
def project():
    """Returns the path of the checkout under test."""
    return PROJECT


@pytest.fixture
def pythons(project):
    """Returns {"pinned": the interpreter with torch 2.2, "newest": the interpreter with the newest torch}. Skips the
    test if one of them is missing. Only tests that need both stacks use this fixture. They are marked as pinned."""
    newest = project / ".venv"
    if os.environ.get("MAMBA_FSDP_TEST_STACK") != "torch2.2" or not (newest / ".complete").exists():
        pytest.skip(
            "needs both environments: tests/run.sh --stack cpu, then tests/run.sh --stack torch2.2"
        )
    return {"pinned": sys.executable, "newest": str(newest / "bin/python")}


@pytest.fixture
def golden(request):
    """Returns the golden files in the folder of the test."""
    return GoldenFiles(request.path.parent, request.config.getoption("renew"))


@pytest.fixture
def answer(capsys):
    """Returns a function answer(module of a verb, *arguments) that runs the verb and returns (exit code, stdout,
    stderr)."""
    from mamba_fsdp import command_line

    def answer(verb, *arguments):
        capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            command_line.run(verb.main, str, list(map(str, arguments)))
        captured = capsys.readouterr()
        return end.value.code, captured.out, captured.err

    return answer


@pytest.fixture
def call(answer):
    """Returns a function call(module of a verb, *arguments) that runs the verb and returns (exit code, stdout and
    stderr)."""

    def call(verb, *arguments):
        code, out, err = answer(verb, *arguments)
        return code, out + err

    return call


@pytest.fixture(scope="session")
def user_folder(tmp_path_factory):
    """Returns the folder of a user after a first training, with data/builtin, runs/demo and exported/demo."""
    from mamba_fsdp.importing.make_dataset import make_dataset
    from mamba_fsdp.interop.convert import publish, write_model
    from mamba_fsdp.settings.dataset_config import DatasetConfig
    from mamba_fsdp.trainer.run import run_training

    folder = tmp_path_factory.mktemp("user")
    (folder / "a.txt").write_text(
        "".join(f"def line_{n}(x): return {n} * x  # naïve\n" for n in range(600))
    )
    options = DatasetConfig(tokenizer="train:300", validation_fraction=0.2)
    make_dataset(str(folder / "a.txt"), folder / "data/builtin", options)
    given = {"vocab_size": 300, "num_steps": 4, "eval_interval": 0, "eval_batches": -1}
    places = {"dataset_path": folder / "data/builtin", "save_ckpt_path": folder / "runs/demo"}
    run_training(resolved(**TINY | given | places), write_model=publish)
    write_model(folder / "runs/demo", folder / "exported/demo")
    return folder


@pytest.fixture
def in_user_folder(user_folder, monkeypatch):
    """Makes `user_folder` the working directory of this process, and returns it."""
    monkeypatch.chdir(user_folder)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return user_folder


@pytest.fixture
def terminal():
    """Provides a Terminal of 80 columns."""
    opened = Terminal()
    yield opened
    opened.close()
