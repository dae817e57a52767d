"""What plan says, beside what others have published and what its own advice comes to; docs/planning.md as it stands."""

import json
import re
import shlex

import pytest

from benchmarks import published
from mamba_fsdp import command_line
from mamba_fsdp.verbs import plan

P4D = "--instance=p4d.24xlarge"


@pytest.fixture
def told(capsys):
    """told(words) -> (exit code, what is printed)."""

    def run(words):
        with pytest.raises(SystemExit) as exit:
            command_line.run(plan.main, lambda: str(plan.__doc__), shlex.split(words))
        said = capsys.readouterr()
        return exit.value.code, said.out + said.err

    return run


def test_published_rates_are_met_within_a_third(project):
    for row in published.PUBLISHED:
        there, expected = published.rates(row)
        assert expected == pytest.approx(there, rel=0.35), row
    assert published.table() in (project / "docs/planning.md").read_text()


def test_every_example_of_the_page_says_what_stands_there(project, told):
    page = (project / "docs/planning.md").read_text()
    examples = re.findall(r"^\$ python -m mamba_fsdp plan (.*)\n((?:.+\n)+?)```", page, re.M)
    assert len(examples) >= 2
    for words, said in examples:
        assert told(words)[1] == said
    for words in re.findall(r"^python -m mamba_fsdp plan (.*)$", page, re.M):
        assert told(words)[0] in (0, 1)


def test_what_does_not_fit_says_so_and_its_advice_fits(told):
    code, said = told(f"mamba_9.8b {P4D} --nodes=24 --batch_size=2")
    assert code == 1 and "it does NOT fit; most are the activations" in said
    assert all(len(line) <= 80 for line in said.splitlines())
    best = re.search(r"^best +24 +(\d+) +([\d/]+) ", said, re.M)
    code, said = told(
        f"mamba_9.8b {P4D} --nodes=24 --batch_size={best[1]} --fsdp_activation_checkpointing=true "
        f"--selective_checkpointing={best[2]}"
    )
    assert code == 0 and "a device: it fits" in said
    code, said = told(f"llama2_70b {P4D}")
    assert code == 1 and int(re.search(r"^best +(\d+) ", said, re.M)[1]) > 1  # nodes
    code, said = told(f"mamba-130m {P4D} --d_model=100000000")
    assert code == 1 and "nothing that was tried fits" in said


def test_more_of_anything_is_not_slower(told):
    """And a global batch that is given stays what it is."""

    def rate(words):
        code, said = told(f"mamba2-2.7b {words} --json")
        return json.loads(said)["tokens_per_second"]

    p4d, p5 = (
        rate(f"--instance={name} --global_batch_size=512")
        for name in ("p4d.24xlarge", "p5.48xlarge")
    )
    assert (
        p5 > 1.5 * p4d and 1.8 * p4d < rate(f"{P4D} --nodes=2 --global_batch_size=512") <= 2 * p4d
    )
    assert rate(f"{P4D} --nodes=8 --network=1") < 0.5 * rate(f"{P4D} --nodes=8")
    found = json.loads(told(f"mamba2-2.7b {P4D} --global_batch_size=512 --json")[1])
    assert (
        found["best"]["global_batch_size"] == 512 and 512 % (8 * found["best"]["batch_size"]) == 0
    )


def test_numbers_agree_with_each_other(told):
    code, said = told(f"mamba-1.4b {P4D} --nodes=2 --tokens=10B --price=32 --json")
    found = json.loads(said)
    assert code == 0 and found["devices"] == 16 and found["fits"]
    assert sum(found["memory"].values()) == found["bytes"]
    steps = 10e9 / found["tokens_per_step"]
    assert found["days"] * 86400 == pytest.approx(steps * found["seconds_per_step"])
    assert found["cost"] == pytest.approx(found["device_hours"] * 4) and found["price"] == 32
    assert found["checkpoint_bytes"] == 12 * found["parameters"]


def test_the_host_bounds_small_micro_batches(told):
    """24 blocks, half a millisecond each; what is advised is larger."""
    found = json.loads(
        told("mamba-130m --instance=p5.4xlarge --seq_length=256 --batch_size=1 --json")[1]
    )
    assert (
        found["seconds_per_step"] - found["step"]["network"] == pytest.approx(24 * 5e-4)
        and found["step"]["launch"]
    )
    assert found["best"]["batch_size"] > 4 and "launch" not in told(f"mamba-2.8b {P4D}")[1]


@pytest.mark.parametrize(
    "words, said",
    [
        ("mamba-130m --instance=p4d.24xlarg", "did you mean p4d.24xlarge?"),
        ("mamba-130m --instance=abacus", "one of p4d.24xlarge"),
        ("mamba-13m", "did you mean mamba-130m?"),
        ("mamba-130m --nods=2", "there is no such setting"),
        (f"mamba-130m {P4D} --price=4/hour", "--price=4/hour: expected a number"),
        (f"mamba-130m {P4D} --nodes=0", "must be at least 1"),
        (
            f"mamba-130m {P4D} --global_batch_size=12 --batch_size=4",
            "is no multiple of batch_size 4 times 8 ranks",
        ),
        (f"mamba-130m {P4D} --sharding_strategy=none", "is for one process, not 8"),
        ("mamba-130m --peak=100", "say of what"),
        ("mamba-130m --config=nowhere", "there is no file nowhere"),
    ],
)
def test_a_mistake_is_a_line(words, said, told):
    code, printed = told(words)
    assert code == 2 and said in printed and len(printed.splitlines()) == 1, printed


def test_the_machine_at_hand(told, monkeypatch):
    """Of a CPU the memory is known, a lower limit, and no rate; of a GPU all that its name tells."""
    code, said = told("demo")
    assert "memory     at least " in said
    assert (
        code == 0 and "1 x cpu" in said and "--memory, --peak" in said and "framework" not in said
    )
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    for name, memory, instance in (
        ("NVIDIA H100 80GB HBM3", 85.0, "p5.4xlarge"),
        ("NVIDIA L4", 23.7, "g6.xlarge"),
        ("NVIDIA A100-SXM4-40GB", 42.3, "p4d.24xlarge --devices=1"),
        ("NVIDIA A100-SXM4-80GB", 85.0, "p4de.24xlarge --devices=1"),
        ("NVIDIA H100 PCIe", 85.0, ""),
    ):
        monkeypatch.setattr("torch.cuda.get_device_name", lambda: name)  # noqa: B023
        monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
        monkeypatch.setattr("torch.cuda.mem_get_info", lambda: (0, memory * 1e9))  # noqa: B023
        found = told("mamba-370m --json")
        assert (
            found == told(f"mamba-370m --instance={instance} --json")
            if instance
            else '"step": {}' in found[1]
        )
