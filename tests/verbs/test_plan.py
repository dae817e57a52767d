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


def test_numbers_agree_with_each_other(told):
    """A global batch that is given stays what it is."""
    words = f"mamba-1.4b {P4D} --nodes=2 --tokens=10B --global_batch_size=512 --json"
    code, said = told(words)
    found = json.loads(said)
    assert code == 0 and found["devices"] == 16 and found["fits"]
    assert sum(found["memory"].values()) == found["bytes"]
    steps = 10e9 / found["tokens_per_step"]
    assert found["days"] * 86400 == pytest.approx(steps * found["seconds_per_step"])
    assert found["checkpoint_bytes"] == 12 * found["parameters"]
    assert found["best"]["global_batch_size"] == 512
    slower = json.loads(told(f"{words} --network=1")[1])
    assert slower["tokens_per_second"] < 0.5 * found["tokens_per_second"]
    muon = json.loads(told(f"{words} --optimizer=muon")[1])
    assert muon["step"]["muon"] > 0 and muon["step"]["network"] > found["step"]["network"]


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
def test_sizes_for_a_time_here_are_timed_and_their_commands_run(told, call, in_user_folder, monkeypatch):
    monkeypatch.setattr(run, "LEAST_STEPS", 3)
    monkeypatch.setattr(run, "TIMED_SECONDS", 0)
    code, said = told("data/builtin --hours=0.001 --batch_size=1")
    assert code == 0 and "timed" in said and "smaller          2 x 64" in said
    assert "The time is too short" in said
    program, verb, *words = shlex.split(said.splitlines()[-1])
    assert (program, verb) == ("mamba-fsdp", "train")
    code, said = call(train, *words, "--dry_run=true")
    assert code == 0 and "tokens; " in said, said
