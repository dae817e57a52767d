"""Tests the results of validations: losses, bits per byte and generated texts."""

import itertools
import shutil

import pytest

import mamba_fsdp
from mamba_fsdp.run.records import read_entries, read_events
from mamba_fsdp.trainer.stopping import StopRequest
from tests.support.checkpoints import weights_of
from tests.support.compare import equal
from tests.support.ranks import run_ranks, train_whole

PROMPTS = ["w1 w2 w3", "w4"]
pytestmark = [pytest.mark.slow, pytest.mark.torch22]


@pytest.fixture
def given(texts, tmp_path):
    """Returns the settings of a run that generates two texts at each validation, after step 0 and after step 1."""
    (tmp_path / "prompts").write_text("\n\n".join(PROMPTS))
    return {
        "dataset_path": texts / "a",
        "eval_prompts": tmp_path / "prompts",
        "eval_interval": 1,
        "num_steps": 1,
    }


def validations_of(folder):
    return [entry for entry in read_entries(folder / "metrics.jsonl") if "val_loss" in entry]


def test_samples_equal_the_output_of_generate_and_do_not_change_the_run(
    train, given, texts, tmp_path
):
    """The generated texts of a validation equal the output of `generate`, and its bits per byte those of `evaluate`
    in the same windows. Generating texts does not change the weights or losses of the run."""
    printed = train(tmp_path / "run", **given)
    first, last = validations_of(tmp_path / "run")
    assert len(first["samples"]) == 2 and f"\nsample     {last['samples'][1]!r}\n" in printed
    model = mamba_fsdp.load(tmp_path / "run")
    found = mamba_fsdp.evaluate(model, texts / "a/validation", seq_length=32, limit=4)
    assert last["val_bits_per_byte"] == pytest.approx(found.bits_per_byte, rel=1e-5)
    for prompt, sample in zip(PROMPTS, last["samples"]):
        pieces = mamba_fsdp.generate(model, prompt, length=50, temperature=0)
        generated = f"{prompt} {''.join(pieces)}".split()
        assert sample.split()[: len(generated)] == generated
        assert len(generated) > len(prompt.split())
        assert len(sample.split()) == len(prompt.split()) + 50

    train(tmp_path / "without", **{**given, "eval_prompts": ""})
    assert equal(weights_of(tmp_path / "run"), weights_of(tmp_path / "without"))
    for entry in (first, last):
        del entry["samples"]
    assert validations_of(tmp_path / "without") == [first, last]


def test_each_source_of_several_has_its_own_validation(train, given, texts, tmp_path):
    """A validation computes the loss of each source separately, and equals `evaluate`. A start with other validation
    data than the last one reports the change."""
    data = tmp_path / "data"
    shutil.copytree(texts, data)
    mixture = given | {"dataset_path": data, "datasets": ["a", "b"], "allow_other_tokenizer": True}
    printed = train(tmp_path / "run", **mixture)
    last = validations_of(tmp_path / "run")[-1]
    model = mamba_fsdp.load(tmp_path / "run")
    for name in ("a", "b"):
        found = mamba_fsdp.evaluate(
            model, data / name / "validation", seq_length=32, limit=4, allow_other_tokenizer=True
        )
        assert last["val_source_loss"][name] == pytest.approx(found.loss, rel=1e-5)
        bits = last["val_source_bits_per_byte"][name]
        assert bits == pytest.approx(found.bits_per_byte, rel=1e-5)
        assert f"\n  {name}  loss {found.loss:.4f}, perplexity " in printed
    losses = last["val_source_loss"].values()
    # The sources have the same number of tokens, so their losses have the same weight.
    assert last["val_loss"] == pytest.approx(sum(losses) / 2)

    shutil.rmtree(data / "b/validation")
    shutil.copytree(data / "b/train", data / "b/validation")
    printed = train(tmp_path / "run", **mixture | {"num_steps": 2})
    assert "the validation data" in printed
    first, second = [
        event["validation"] for event in read_events(tmp_path / "run") if "validation" in event
    ]
    assert first["a"] == second["a"] and first["b"] != second["b"]


def train_on_rank(world, settings):
    """Trains with an on_record function that requests a stop at the validation of step 1.

    Returns (result of the training, number of records that the function got).
    """
    heard = []

    def hear(record):
        heard.append(record)
        return "val_loss" in record and record["step"] == 1

    return train_whole(world, settings, on_record=hear), len(heard)


def test_two_ranks_write_the_samples_of_one_and_stop_together(train, given, settings_of, tmp_path):
    """Two ranks write the same samples as one rank. If the on_record function of rank 0 requests a stop, both ranks
    stop after the step that is in progress. The function still gets the record of this step. The function of rank 1
    gets no records."""
    given |= {"global_batch_size": 4, "schedule": "constant"}
    settings = settings_of(**{**given, "num_steps": 4}, sharding_strategy="fsdp")
    (trained, heard), (other, heard_by_other) = run_ranks(2, train_on_rank, settings)
    assert trained == other and (heard, heard_by_other) == (4, 0)
    assert trained.stopped == "on_record" and trained.last["step"] == 2
    train(tmp_path / "one", **given)
    samples = [entry["samples"] for entry in validations_of(tmp_path / "run")]
    assert samples == [entry["samples"] for entry in validations_of(tmp_path / "one")]


def stopped_at(world, look, settings):
    """Trains on several ranks. Only rank 1 gets a request to stop. It finds the request at the check number `look`,
    counted from 1, and at all later checks."""
    looks = itertools.count(1)
    StopRequest.check = lambda request: world.rank == 1 and next(looks) >= look
    train_whole(world, settings)


def test_ranks_stop_at_the_same_batch_of_a_validation(settings_of, tmp_path):
    """If only one rank gets a request to stop during a validation, all ranks stop at the same batch. The next start
    makes this validation."""
    settings = settings_of(sharding_strategy="fsdp", num_steps=2, batch_size=1, eval_interval=2)
    # Check 6 is at the first batch of the validation after step 2.
    for look, validated in ((6, {0}), (99, {0, 2})):
        run_ranks(2, stopped_at, look, settings)
        steps = {entry["step"] for entry in validations_of(tmp_path / "run")}
        assert steps == validated
