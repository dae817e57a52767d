"""sample_prompts: what the model writes at each validation, and that training does not feel it."""

import json

import pytest
import torch

from mamba_fsdp.errors import UserError

PROMPTS = [[5, 6, 7, 8, 9], [3], [1, 2]]


@pytest.mark.slow
def test_a_run_writes_samples_at_each_validation_and_trains_as_without(
    train, tmp_path, corpus, metrics_of, weights_of, monkeypatch
):
    given = {"dataset_path": corpus / "words/data"}
    train(tmp_path / "without", **given)
    train(tmp_path / "with", sample_prompts=corpus / "prompts", sample_length=5, **given)
    assert metrics_of(tmp_path / "with") == metrics_of(tmp_path / "without")
    weights = weights_of(tmp_path / "without")
    assert all(
        torch.equal(tensor, weights[name]) for name, tensor in weights_of(tmp_path / "with").items()
    )
    lines = [
        json.loads(line) for line in (tmp_path / "with/generated.jsonl").read_text().splitlines()
    ]
    assert [(line["step"], line["prompt"]) for line in lines] == [
        (step, prompt) for step in (0, 3, 6) for prompt in ("a b\nc", "h")
    ]
    assert all(set(line["text"].split()) <= set("?abcdefgh") for line in lines) and any(
        line["text"] for line in lines
    )


@pytest.mark.parametrize(
    "text, message",
    [
        (None, "prompts: No such file or directory"),
        ("", "holds 0 prompts; write one a line"),
        ("\n".join(map(str, range(65))), "holds 65 prompts"),
        (b"caf\xe9\n", "can't decode byte 0xe9"),
    ],
)
def test_prompts_that_do_not_serve_are_refused_before_anything_is_trained(
    train, tmp_path, corpus, text, message
):
    if text is not None:
        (tmp_path / "prompts").write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(
        UserError, match=f"sample_prompts {tmp_path}/prompts: .*{message}|{message}"
    ):
        train(
            tmp_path / "run",
            dataset_path=corpus / "words/data",
            sample_prompts=tmp_path / "prompts",
        )
    assert not (tmp_path / "run/metrics.jsonl").exists()


def test_data_without_a_tokenizer_has_no_words_for_prompts(train, tmp_path, corpus):
    with pytest.raises(UserError, match="sample_prompts .*tokenizer"):
        train(tmp_path / "run", sample_prompts=corpus / "prompts")
