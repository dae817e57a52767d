"""What plan says, beside what others have published and what its own advice comes to."""

import json
import re
import shlex

import pytest

from benchmarks import published
from mamba_fsdp.model.spec import parameter_count
from mamba_fsdp.settings.resolve import resolve_settings
from mamba_fsdp.trainer import run
from mamba_fsdp.verbs import plan, train

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
    assert published.compared() in (project / "benchmarks/RESULTS.md").read_text()


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
        ("data/builtin", "is data; to see what to train on it, add the time: --hours=8"),
        ("data/bultin --hours=8", "no such folder; did you mean builtin?"),
        ("data/builtin --hours=0", "must be above 0"),
        ("data/builtin --hours=8 --tokens=2e9", "name the data, as in plan data/mine --hours=8"),
        ("--hours=8", "name the data, as in plan data/mine --hours=8"),
        ("data/builtin --hours=8 --d_model=64", "d_model: with --hours, plan chooses it"),
        ("mamba-130m --hours=8", "plan data/mine --model_name=mamba-130m"),
        ("data/builtin --hour=8", "did you mean --hours?"),
        ("--hours=8 --tokens=2e9 --model_name=olmo-hybrid-7b", "olmo-hybrid-7b has widths of its"),
        ("data/builtin --hours=8 --nodes=2", "can time one device of this machine"),
    ],
)
@pytest.mark.torch22
def test_a_mistake_is_a_line(words, said, told, there):
    code, printed = told(words)
    assert code == 2 and said in printed and len(printed.splitlines()) == 1, printed


def test_of_the_machine_at_hand_the_memory_is_known(told):
    code, said = told("demo")
    assert code == 0 and "1 x cpu" in said and "--memory, --peak" in said
    assert "framework" not in said


def named(words):
    """{setting: text} of words as in --d_model=64."""
    return dict(word.removeprefix("--").split("=", 1) for word in words)


@pytest.mark.torch22
def test_sizes_for_a_time_on_given_machines(told):
    words = "--hours=0.2 --tokens=1e8 --instance=p5.4xlarge --nodes=2"
    code, said = told(words)
    assert code == 0 and "The data is too small for this time" in said
    assert all(len(line) <= 80 for line in said.splitlines() if "--" not in line)
    code, said = told(f"{words} --batch_size=16 --json")
    sizes = list(json.loads(said).values())
    assert code == 0 and 10 < sizes[1]["tokens_per_parameter"] < 40
    parameters = []
    for size in sizes:
        start, nodes, launcher, *given = shlex.split(size["command"])
        assert [start, nodes, launcher] == ["sbatch", "--nodes=2", "1.train.sbatch"]
        settings = resolve_settings(named(given))
        assert settings.training.num_steps.count == pytest.approx(size["tokens"], rel=0.05)
        parameters.append(parameter_count(settings.model))
    assert parameters == [size["expected"]["parameters"] for size in sizes]
    assert parameters == sorted(set(parameters))


@pytest.mark.torch22
def test_sizes_for_a_time_here_are_timed_and_their_commands_run(told, call, there, monkeypatch):
    monkeypatch.setattr(run, "LEAST_STEPS", 3)
    monkeypatch.setattr(run, "TIMED_SECONDS", 0)
    code, said = told("data/builtin --hours=0.001 --batch_size=1")
    assert code == 0 and "timed" in said and "smaller          2 x 64" in said
    assert "The time is too short" in said
    program, verb, *words = shlex.split(said.splitlines()[-1])
    assert (program, verb) == ("mamba-fsdp", "train")
    code, said = call(train, *words, "--dry_run=true")
    assert code == 0 and "tokens; " in said, said
