"""The file STOP, by which 1.train.sbatch asks the training to stop: nobody makes it when the script is over."""

import os
import subprocess
import time

import pytest

ASK = 'start_asking USR1; until [ -e "$run_folder/STOP" ]; do sleep 0.05; done'


def run(project, folder, script):
    """Runs `script` with the launcher's functions and folder/run as the run folder; what there is when it is over."""
    (folder / "run").mkdir()
    preamble = f'project="{project}"; source "$project/1.train.sbatch"; trap clean_up EXIT; ' \
               f'source "$project/mamba_fsdp/launch/environment.sh"; run_folder="{folder}/run"; '
    clean = {name: value for name, value in os.environ.items() if not name.startswith("SLURM")}
    with open(folder / "said", "w") as said:  # no pipe, which would wait for whoever is left
        done = subprocess.run(["bash", "-euc", preamble + script], env=clean, stdout=said, stderr=said, timeout=60)
    return done.returncode, (folder / "said").read_text(), sorted(path.name for path in (folder / "run").iterdir())


@pytest.mark.parametrize("script", [
    "stop_asking; start_asking USR1; sleep 0.3; exit 3",  # a signal that comes when the training is over
    f"{ASK}; exit 3",  # the nodes were not fit
    f"{ASK}; stop_asking; stop_asking; exit 3"])
def test_nobody_asks_when_the_script_is_over(project, tmp_path, script):
    """Else the next start of the job finds STOP, and ends as if somebody wanted it."""
    assert run(project, tmp_path, script) == (3, "", [])


@pytest.mark.slow
def test_nobody_asks_when_the_script_was_killed(project, tmp_path):
    code, _, _ = run(project, tmp_path, f"{ASK}; kill -9 $$")
    assert code == -9
    time.sleep(2.5)  # between two requests there are two seconds
    (tmp_path / "run/STOP").unlink()
    time.sleep(2.5)
    assert not (tmp_path / "run/STOP").exists()
