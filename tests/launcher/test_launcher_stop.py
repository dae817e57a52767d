"""The file STOP, by which 1.train.sbatch asks the training to stop: nobody makes it when the script is over."""

import contextlib
import subprocess
from pathlib import Path

import pytest

from tests.support.processes import wait_until

ASK = 'start_asking USR1; until [ -e "$run_folder/STOP" ]; do sleep 0.05; done'


def run(project, folder, script):
    """Runs `script` with the launcher's functions and folder/run as the run folder, in a session of its own.
    Returns the session's number, and when it is over, its code and the files in the run folder."""
    (folder / "run").mkdir()
    preamble = (
        f'project="{project}"; source "$project/1.train.sbatch"; trap clean_up EXIT; '
        'for file in environment job; do source "$project/mamba_fsdp/launch/$file.sh"; done; '
        f'run_folder="{folder}/run"; '
    )
    with open(folder / "said", "w") as said:
        process = subprocess.Popen(
            ["bash", "-euc", preamble + script], start_new_session=True, stdout=said
        )
    code = process.wait(400)
    return process.pid, code, [path.name for path in (folder / "run").iterdir()]


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
        "stop_asking; start_asking USR1; sleep 0.3; exit 3",  # a signal that comes when all is over
        f"{ASK}; exit 3",  # the nodes were not fit
        f"{ASK}; stop_asking; stop_asking; exit 3",
    ],
)
def test_nobody_asks_when_the_script_is_over(project, tmp_path, script):
    """Else the next start of the job finds STOP, and ends as if somebody wanted it."""
    assert run(project, tmp_path, script)[1:] == (3, [])


TRIES = """
failures=$run_folder/failures
mkdir "$failures"
try() { echo "$*" > "$failures/outcome"; starts_again > "$failures/said" && echo yes || echo no; }
commit() { mkdir -p "$run_folder/checkpoints/step_$1"; touch "$run_folder/checkpoints/step_$1/COMMIT"; }
"""


def test_ranks_start_again_in_place_once_for_each_new_checkpoint(project, tmp_path):
    """Not after a mistake or a request to stop, and not where MAX_RESTARTS=0."""
    lost = "unknown 1 rank 0 on a"
    script = f"try {lost}; try {lost}; commit 00000001; try {lost}; try {lost}; commit 00000002; "
    script += "try unknown 2; try stopped 1; try finished 0; "
    script += f"MAX_RESTARTS=0; try {lost}; MAX_RESTARTS=1; try {lost}"
    _, code, _ = run(project, tmp_path, TRIES + script)
    answers = (tmp_path / "said").read_text().split()
    assert code == 0 and answers == ["yes", "no", "yes", "no", *["no"] * 4, "yes"]


@pytest.mark.parametrize(
    "outcome, code, said",
    [
        ("stopped 137", 1, "ended at start: the file STOP asked"),
        ("failed 2", 2, "not queued again"),
    ],
)
def test_a_job_that_was_asked_to_stop_or_has_a_mistake_is_not_queued_again(
    project, tmp_path, outcome, code, said
):
    """Whatever the outcome's first line says after the code."""
    lost = "rank 1 on node2 failed first."
    outcome = f"printf '{outcome} rank 1 on node2: no more\\n{lost}\\n' > $run_folder/outcome"
    script = f"failures=$run_folder; {outcome}; SLURM_JOB_NODELIST='' decide 1"
    assert run(project, tmp_path, script)[1] == code
    first, last = (tmp_path / "said").read_text().splitlines()
    assert first.startswith(said) and last == lost


@pytest.mark.slow
def test_nobody_asks_when_the_script_was_killed(project, tmp_path):
    session, code, _ = run(project, tmp_path, f"{ASK}; kill -9 $$")
    assert code == -9
    wait_until(lambda: not living(session))


def test_nodes_are_not_called_unfit_where_scancel_has_ended_their_check(project, tmp_path):
    script = (
        "await() { stop_asked=TERM; }; on_first_node() { say judged; }; decide() { say $1; exit $1; }; "
        "srun=() container=() nodes=(a) python=python; check_nodes"
    )
    assert run(project, tmp_path, script)[1:] == (143, [])
    assert (tmp_path / "said").read_text() == "143\n"


@pytest.mark.parametrize("attempt, code", [("7.0", 2), ("7.1", 1)])
def test_storage_that_fails_at_a_later_start_of_a_job_is_no_mistake(
    project, tmp_path, attempt, code
):
    """decide's exit code says what becomes of the job: after a mistake it is not queued again."""
    (tmp_path / "file").touch()
    script = f"attempt={attempt} nodes=(a) run_folder={tmp_path}/file; decide() {{ exit $1; }}; check_nodes"
    assert run(project, tmp_path, script)[1:] == (code, [])
