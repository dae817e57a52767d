"""What plan says, beside what others have published and what its own advice comes to."""

import json
import re
import shlex

import pytest

from benchmarks import published
from mamba_fsdp.verbs import plan

P4D = "--instance=p4d.24xlarge"


@pytest.fixture
def told(call):
    """told(words) -> (exit code, what is printed)."""
    return lambda words: call(plan, *shlex.split(words))


@pytest.mark.slow
def test_published_rates_are_met_within_a_third(project):
    for row in published.PUBLISHED:
        there, expected = published.rates(row)
        assert expected == pytest.approx(there, rel=0.35), row
    assert published.table() in (project / "benchmarks/RESULTS.md").read_text()


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


@pytest.mark.parametrize(
    "words, said",
    [
        ("mamba-130m --instance=p4d.24xlarg", "did you mean p4d.24xlarge?"),
        ("mamba-130m --nods=2", "there is no such setting"),
        (f"mamba-130m {P4D} --memory=4GB", "--memory=4GB: expected a number"),
        (f"mamba-130m {P4D} --nodes=0", "must be at least 1"),
        (
            f"mamba-130m {P4D} --global_batch_size=12 --batch_size=4",
            "is not a multiple of batch_size 4 times 8 ranks",
        ),
        ("mamba-130m --peak=100", "a machine that is not named"),
    ],
)
def test_a_mistake_is_a_line(words, said, told):
    code, printed = told(words)
    assert code == 2 and said in printed and len(printed.splitlines()) == 1, printed


def test_of_the_machine_at_hand_the_memory_is_known(told):
    code, said = told("demo")
    assert code == 0 and "1 x cpu" in said and "--memory, --peak" in said
    assert "framework" not in said
