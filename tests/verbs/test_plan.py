"""What plan says, and what its own advice comes to."""

import json
import re
import shlex

import pytest

from mamba_fsdp.trainer import run
from mamba_fsdp.verbs import plan, train

P4D = "--instance=p4d.24xlarge"


@pytest.fixture
def told(call):
    """told(words) -> (exit code, what is printed)."""
    return lambda words: call(plan, *shlex.split(words))


@pytest.mark.slow
def test_what_does_not_fit_says_so_and_its_advice_fits(told):
    code, said = told(f"mamba_9.8b {P4D} --nodes=24 --batch_size=2")
    assert code == 1 and "it does NOT fit; the largest part: activations" in said
    assert all(len(line) <= 80 for line in said.splitlines())
    best = re.search(r"^best +24 +(\d+) +([\d/]+) ", said, re.M)
    code, said = told(
        f"mamba_9.8b {P4D} --nodes=24 --batch_size={best[1]} --fsdp_activation_checkpointing=true "
        f"--selective_checkpointing={best[2]}"
    )
    assert code == 0 and "a device: it fits" in said
    code, said = told(f"llama2_70b {P4D}")
    assert code == 1 and "nothing that was tried fits" in said


REPORT = """\
model      mamba-130m: 129,135,360 parameters
machines   2 x p5.4xlarge: 2 x H100 of 85.0 GB
memory     14.6 GB a device: it fits
           weights        259.6 MB
           gradients      259.6 MB
           moments        519.2 MB
           gathered       107.2 MB
           activations     11.0 GB
           loss           320.2 MB
           framework        2.1 GB
step       1.533 s of 256 x 2,048 = 524,288 tokens
           products        0.314 s
           recurrence      0.692 s
           memory          0.421 s
           network         0.106 s
           hidden          0.334 s
speed      341,964 tokens/s, 170,982 a device, 14% of its peak
length     300,000,000,000 tokens: 10.15 days, 487.4 device-hours
checkpoint 1.5 GB
           nodes  batch_size  recompute  global     memory     tokens/s
as given       2          16          0     256    14.6 GB      341,964
best           2          64          0     256    48.9 GB      363,445
"""


def test_the_report_of_a_model_on_machines(told):
    """A global batch that is given stays what it is."""
    words = "mamba-130m --instance=p5.4xlarge --nodes=2 --global_batch_size=256"
    assert told(words) == (0, REPORT)
    code, said = told(f"{words} --tokens=3B --json")
    found = json.loads(said)
    assert code == 0 and found["tokens"] == 3 * 10**9
    assert found["days"] == pytest.approx(0.1016, rel=1e-3)
    assert found["best"]["global_batch_size"] == 256 and found["best"]["batch_size"] == 64
    code, said = told("demo --memory=1 --peak=100 --bandwidth=1000 --d_state=8 --headdim=9")
    assert code == 0 and "length     1,000,000,000 tokens" in said
    assert "settings   headdim=9 has no effect" in said and "1 x device of 1.0 GB" in said


def test_of_the_machine_at_hand_the_memory_is_known(told):
    code, said = told("demo")
    assert code == 0 and "1 x cpu" in said and "--memory, --peak" in said
    assert "framework" not in said


def test_sizes_for_machines_that_are_described(told):
    words = "--hours=0.2 --tokens=1e8 --instance=p5.4xlarge --nodes=2 --batch_size=16"
    code, said = told(words)
    assert code == 0 and "The data is too small for this time" in said
    assert "sbatch --nodes=2 1.train.sbatch --dataset_path=data/mine " in said
    assert all(len(line) <= 80 for line in said.splitlines() if "--" not in line)
    sizes = json.loads(told(f"{words} --json")[1])
    assert [*sizes] == ["smaller", "middle", "larger"]


@pytest.mark.torch22
def test_sizes_for_a_time_here_are_timed_and_their_commands_run(
    told, call, in_user_folder, monkeypatch
):
    monkeypatch.setattr(run, "LEAST_STEPS", 3)
    monkeypatch.setattr(run, "TIMED_SECONDS", 0)
    code, said = told("data/builtin --hours=0.001 --batch_size=1")
    assert code == 0 and "timed" in said and "smaller          2 x 64" in said
    assert "The time is too short" in said
    program, verb, *words = shlex.split(said.splitlines()[-1])
    assert (program, verb) == ("mamba-fsdp", "train")
    code, said = call(train, *words, "--dry_run=true")
    assert code == 0 and "tokens; " in said, said
