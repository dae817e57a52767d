"""Who watches a run: the texts that it writes at each validation, and a caller who hears its records and may stop it."""

import pytest

import mamba_fsdp
from mamba_fsdp.errors import UserError
from mamba_fsdp.run.records import read, read_status
from mamba_fsdp.trainer import run
from tests.support.checkpoints import equal
from tests.support.ranks import run_ranks
from tests.trainer.test_tokenizers import data  # noqa: F401 (a fixture)

PROMPTS = ["w1 w2 w3", "w4"]


@pytest.fixture
def given(data, tmp_path):  # noqa: F811
    """Settings of a run that writes two samples at each of its validations, after steps 0, 3 and 6."""
    (tmp_path / "prompts").write_text("\n\n".join(PROMPTS))
    return {"dataset_path": data / "a", "eval_prompts": tmp_path / "prompts"}


def samples_of(folder):
    return [entry["samples"] for entry in read(folder / "metrics.jsonl") if "samples" in entry]


@pytest.mark.slow
@pytest.mark.torch22
def test_samples_are_what_generate_writes_and_change_nothing(
    train, given, tmp_path, weights_of, metrics_of
):
    said = train(tmp_path / "run", **given)
    train(tmp_path / "without", dataset_path=given["dataset_path"])
    *_, last = samples = samples_of(tmp_path / "run")
    assert len(samples) == 3 and f"\nsample     {last[1]!r}\n" in said
    assert equal(weights_of(tmp_path / "run"), weights_of(tmp_path / "without"))
    entries = metrics_of(tmp_path / "run")
    assert metrics_of(tmp_path / "without") == [
        {key: value for key, value in entry.items() if key != "samples"} for entry in entries
    ]
    model = mamba_fsdp.load(tmp_path / "run")
    for prompt, sample in zip(PROMPTS, last):
        pieces = mamba_fsdp.generate(model, prompt, length=50, temperature=0)
        generated = f"{prompt} {''.join(pieces)}".split()
        assert sample.split()[: len(generated)] == generated and len(generated) > len(
            prompt.split()
        )
        assert len(sample.split()) == len(prompt.split()) + 50


@pytest.mark.slow
@pytest.mark.torch22
def test_a_caller_hears_the_records_and_stops_a_run_that_resumes_to_the_bit(
    train, given, tmp_path, weights_of
):
    heard = []

    def listen(record):
        heard.append(record)
        return "val_loss" in record and record["step"] == 3

    train(tmp_path / "whole", **given)
    said = train(tmp_path / "run", **given, on_record=listen)
    assert "stopped    at step 4 (on_record); the same command resumes from here" in said
    assert heard == read(tmp_path / "run/metrics.jsonl")
    status = read_status(tmp_path / "run")
    assert (status["status"], status["step"], status["reason"]) == ("stopped", 4, "on_record")
    train(tmp_path / "run", **given, on_record=heard.append)
    assert heard == read(tmp_path / "run/metrics.jsonl") and heard[-1]["step"] == 6
    assert equal(weights_of(tmp_path / "run"), weights_of(tmp_path / "whole"))
    assert samples_of(tmp_path / "run") == samples_of(tmp_path / "whole")


def train_on_rank(world, settings):
    run.start_world = lambda **_: world
    heard = []
    trained = run.run_training(settings, on_record=lambda record: heard.append(record) or heard[3:])
    return trained, len(heard)


@pytest.mark.slow
@pytest.mark.torch22
def test_two_ranks_write_the_samples_of_one_and_stop_together(train, given, settings_of, tmp_path):
    """Rank 0 alone hears the records. It asks at the fourth, the validation of step 2, and also hears of step 3."""
    given |= {"global_batch_size": 4, "eval_interval": 2, "schedule": "constant"}
    settings = settings_of(**given, sharding_strategy="fsdp")
    (trained, heard), (other, heard_by_other) = run_ranks(2, train_on_rank, settings)
    assert trained == other and (heard, heard_by_other) == (5, 0)
    assert trained.stopped == "on_record" and trained.last["step"] == 3
    assert trained.last["samples"] == samples_of(tmp_path / "run")[-1]
    train(tmp_path / "one", **given, num_steps=2)
    assert samples_of(tmp_path / "one") == samples_of(tmp_path / "run")


@pytest.mark.parametrize(
    "wrong, told",
    [
        ({"eval_prompts": "gone.txt"}, "eval_prompts=gone.txt: can't be read: No such file"),
        ({"eval_prompts": "{tmp_path}"}, "can't be read: Is a directory"),
        ({"eval_prompts": "/dev/null/.txt"}, "can't be read: Not a directory"),
        ({"eval_prompts": "caf\udce9"}, "can't be read: .*surrogates not allowed"),
        ({"eval_prompts": "{tmp_path}/blank.txt"}, "blank.txt: no prompt is there"),
        ({"eval_prompts": "w1 w2\n" * 400}, "400 prompts of up to 2 tokens, with 50 after"),
        ({"context_parallel": 2}, r"share sequences \(context_parallel=2\) can't"),
        ({"use_dummy_dataset": True}, "there is no data to validate on"),
        ({"dataset_path": "{corpus}"}, "the store has no tokenizer"),
        ({"on_record": "print"}, "on_record=print is not a function"),
    ],
)
def test_a_mistake_is_a_line(train, given, tmp_path, corpus, wrong, told):
    (tmp_path / "blank.txt").write_text(" \n")
    places = {"tmp_path": tmp_path, "corpus": corpus}
    wrong = {
        name: value.format(**places) if isinstance(value, str) else value
        for name, value in wrong.items()
    }
    with pytest.raises(UserError, match=told) as mistake:
        train(tmp_path / "run", **{**given, **wrong})
    assert "\n" not in str(mistake.value)
