"""The file STOP, by which 1.train.sbatch asks the training to stop: nobody makes it when the script is over."""

import contextlib
import os
import subprocess
import time
from pathlib import Path

import pytest

ASK = 'start_asking USR1; until [ -e "$run_folder/STOP" ]; do sleep 0.05; done'


def run(project, folder, script):
    """Runs `script` with the launcher's functions and folder/run as the run folder, in a session of its own; the
    session's number, and when it is over, its code, what it said, the files in the run folder."""
    (folder / "run").mkdir()
    preamble = (
        f'project="{project}"; source "$project/1.train.sbatch"; trap clean_up EXIT; '
        f'source "$project/mamba_fsdp/launch/environment.sh"; run_folder="{folder}/run"; '
    )
    clean = {name: value for name, value in os.environ.items() if not name.startswith("SLURM")}
    with open(folder / "said", "w") as said:  # no pipe, which would wait for whoever is left
        process = subprocess.Popen(
            ["bash", "-euc", preamble + script],
            env=clean,
            stdout=said,
            stderr=said,
            start_new_session=True,
        )
        code = process.wait(400)
    return (
        process.pid,
        code,
        (folder / "said").read_text(),
        sorted(path.name for path in (folder / "run").iterdir()),
    )


def living(session):
    """The processes of a session that have not ended."""
    stats = []
    for file in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            stats.append(file.read_text().rpartition(")")[2].split())
    return [stat for stat in stats if stat[3] == str(session) and stat[0] not in "ZX"]


@pytest.mark.parametrize(
    "script",
    [
        "stop_asking; start_asking USR1; sleep 0.3; exit 3",  # a signal that comes when the training is over
        f"{ASK}; exit 3",  # the nodes were not fit
        f"{ASK}; stop_asking; stop_asking; exit 3",
    ],
)
def test_nobody_asks_when_the_script_is_over(project, tmp_path, script):
    """Else the next start of the job finds STOP, and ends as if somebody wanted it."""
    assert run(project, tmp_path, script)[1:] == (3, "", [])


@pytest.mark.slow
def test_nobody_asks_when_the_script_was_killed(project, tmp_path):
    session, code, *_ = run(project, tmp_path, f"{ASK}; kill -9 $$")
    assert code == -9
    end = time.monotonic() + 100  # between two requests there are two seconds
    while time.monotonic() < end and living(session):
        time.sleep(0.05)
    assert not living(session)


CTRL_Z = """
bash -c 'trap "sleep 0.5; kill -STOP \\$\\$; touch $1/continued; exit" TSTP; touch $1/ready
         while :; do sleep 0.05; done' - "$run_folder" & child=$!
until [ -e "$run_folder/ready" ]; do sleep 0.05; done
(until [[ $(cat /proc/$$/stat) == *") T "* ]]; do sleep 0.05; done; kill -CONT $$) &
stand_still
for _ in {1..600}; do [ ! -e "$run_folder/continued" ] || exit 3; sleep 0.05; done
kill -KILL $child
"""


@pytest.mark.slow
def test_what_continues_as_soon_as_it_has_stopped_continues_its_node_too(project, tmp_path):
    """A node takes a while to stop its ranks and itself: Ctrl-Z and then fg must not come in between."""
    assert run(project, tmp_path, CTRL_Z)[1:] == (3, "", ["continued", "ready"])
