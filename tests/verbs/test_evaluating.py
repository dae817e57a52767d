"""What `evaluate` measures: sliding windows, text, named datasets, two models together, several ranks, JSON."""

import json
import math
import os
import subprocess
import sys

import numpy as np
import pytest
import torch

from mamba_fsdp import command_line
from mamba_fsdp.data.store import TokenStore
from mamba_fsdp.verbs import evaluate, loading

STORE = "data/builtin/validation"
pytestmark = pytest.mark.torch22


def run(capsys, *words):
    """(stdout, stderr) of evaluate with these words."""
    with pytest.raises(SystemExit) as exit:
        command_line.run(evaluate.main, lambda: "help", list(map(str, words)))
    told = capsys.readouterr()
    assert exit.value.code == 0, told.err
    return told


def lines(count):
    return "".join(json.dumps({"text": f"def line_{n}(x): naïve"}) + "\n" for n in range(count))


@pytest.fixture
def model(there):
    return loading.load("runs/demo")


@pytest.mark.parametrize("stride", [32, 20, 7])
@torch.no_grad()
def test_each_token_is_scored_once_with_at_least_window_less_stride_before_it(model, stride):
    window, tokens = 32, TokenStore(STORE)
    tokens = torch.from_numpy(tokens.read(0, tokens.token_count).tokens.astype(np.int64))
    total, scored = 0.0, 1  # the first token is never predicted
    for start in range(
        0, len(tokens), stride
    ):  # as transformers' page on perplexity of long texts does it
        end = min(start + window + 1, len(tokens))
        logits = model.network(tokens[None, start : end - 1])[0].float().log_softmax(-1)
        for at in range(scored, end):
            assert start == 0 or at - start > window - stride
            total -= float(logits[at - start - 1, tokens[at]])
        scored = end
        if end == len(tokens):
            break
    found = evaluate.evaluate(model, STORE, seq_length=window, stride=stride)
    assert found.tokens == scored - 1 == len(tokens) - 1 and (found.window, found.stride) == (
        window,
        stride,
    )
    assert found.loss == pytest.approx(total / found.tokens, rel=1e-5)


def test_more_context_does_not_change_what_is_counted(model):
    apart, over = (
        evaluate.evaluate(model, STORE, seq_length=32, stride=stride, limit=9) for stride in (0, 8)
    )
    assert apart.tokens == 9 * 32 and over.tokens == 32 + 8 * 8
    whole, other = (
        evaluate.evaluate(model, STORE, seq_length=32, stride=stride) for stride in (0, 8)
    )
    assert (whole.words, whole.bytes) == (other.words, other.bytes) and whole.loss != other.loss


def test_words_and_bytes_do_not_depend_on_the_pieces(model, monkeypatch):
    whole = evaluate.evaluate(model, STORE, seq_length=32)
    store = TokenStore(STORE)
    monkeypatch.setattr(evaluate, "DECODED", store.token_count // 3)
    text = model.tokenizer_path
    from mamba_fsdp.data.tokenizer import load_words

    words = (
        load_words(text)
        .backend.decode(store.read(1, store.token_count - 1).tokens.tolist())
        .split()
    )
    assert whole.words == len(words)
    again = evaluate.evaluate(model, STORE, seq_length=32)
    assert (
        again.bytes == whole.bytes and whole.words <= again.words <= whole.words + 3
    )  # one document, cut in words


def test_text_is_measured_as_the_store_that_get_dataset_makes_of_it(there, tmp_path, capsys):
    from config.dataset_config import DatasetConfig
    from mamba_fsdp.data import text, tokenize

    (tmp_path / "b.jsonl").write_text(lines(60))
    options = DatasetConfig(tokenizer="runs/demo/tokenizer", validation_fraction=0, workers=1)
    tokenize.make_dataset(text.open_source(str(tmp_path / "b.jsonl"), options), tmp_path / "made")
    capsys.readouterr()
    of_text, of_store = (
        run(capsys, "runs/demo", place, "--seq_length=16", "--stride=4").out.splitlines()
        for place in (tmp_path / "b.jsonl", tmp_path / "made" / "train")
    )
    assert (
        of_text[:-1] == of_store[:-1] and of_text[1] == "windows        16 tokens long, one every 4"
    )


def test_a_named_dataset_is_measured_on_validation_and_test(there, capsys, monkeypatch):
    datasets = pytest.importorskip("datasets")
    asked = []

    def load(name, config, split, streaming):
        asked.append((name, config, split))
        return datasets.Dataset.from_dict({"text": [f" = {split} {n} = \n" for n in range(20)]})

    monkeypatch.setattr(datasets, "load_dataset", load)
    told = run(
        capsys,
        "runs/demo",
        "Salesforce/wikitext",
        "--config=wikitext-103-raw-v1",
        "--seq_length=16",
        "--json",
    )
    assert [each[2] for each in asked] == ["validation", "test"] and asked[0][
        1
    ] == "wikitext-103-raw-v1"
    assert told.err.count("bits per byte  ") == 2
    assert told.err.startswith("data           Salesforce/wikitext validation\n")
    found = json.loads(told.out)["data"]["Salesforce/wikitext test"]["model"]
    assert found["bytes"] == pytest.approx(sum(len(f" = test {n} = \n") for n in range(20)), abs=3)
    assert found["word_perplexity"] == pytest.approx(
        math.exp(found["loss"] * found["tokens"] / found["words"])
    )


def test_two_models_are_compared_and_json_is_all_there_is_on_stdout(there, tmp_path, capsys):
    other = tmp_path / "other"
    words = [
        "runs/demo/checkpoints/step_00000002",
        STORE,
        "--seq_length=32",
        "--compare_baseline=runs/demo",
        "--limit=20",
    ]
    told = run(capsys, *words).out.splitlines()
    assert (
        told[1:3] == [f"model          {words[0]}", "baseline       runs/demo"]
        and max(map(len, told)) < 80
    )
    told_json = run(capsys, *words, "--json", "--generate_samples=2")
    found = json.loads(told_json.out)
    model, baseline = (found["data"][STORE][role] for role in ("model", "baseline"))
    row = next(line for line in told if line.startswith("bits per byte")).split()[3:]
    ours, theirs = model["bits_per_byte"], baseline["bits_per_byte"]
    assert (
        list(map(float, row)) == pytest.approx([ours, theirs, ours - theirs], abs=1e-4)
        and ours != theirs
    )
    assert len(found["samples"]) == 2 and all(prompt and text for prompt, text in found["samples"])
    assert "--- sample ---" in told_json.err and not other.exists()


def test_json_of_a_diverged_model_parses(there, capsys, monkeypatch):
    monkeypatch.setattr("mamba_fsdp.train.loop.evaluate", lambda *_: (math.nan, 5))
    found = run(capsys, "runs/demo", STORE, "--seq_length=32", "--limit=2", "--json").out
    assert json.loads(found, parse_constant=pytest.fail)["data"][STORE]["model"]["loss"] is None


def test_models_of_other_tokenizers_are_compared_over_text_by_word_and_byte(
    there, tmp_path, capsys
):
    from mamba_fsdp.data import tokenizer
    from mamba_fsdp.verbs import export

    export.main("runs/demo", str(tmp_path / "theirs"))
    tokenizer.train(["def other words"], 257).save(tmp_path / "theirs")
    (tmp_path / "a.txt").write_text("def naïve(x): return 3\n" * 30)
    words = [
        "runs/demo",
        tmp_path / "a.txt",
        "--seq_length=16",
        f"--compare_baseline={tmp_path / 'theirs'}",
    ]
    capsys.readouterr()
    told = run(capsys, *words).out
    assert (
        "Their tokenizers differ" in told
        and "bits per byte" in told
        and "perplexity per token" not in told
    )
    words[1] = STORE
    with pytest.raises(SystemExit):
        command_line.run(evaluate.main, lambda: "", list(map(str, words)))
    assert "different tokenizers" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words, said",
    [
        (["runs/demo"], "name DATA"),
        (["runs/demo", STORE, "--seq_length=8", "--stride=9"], "longer than a window"),
        (["runs/demo", "nowhere.txt"], "nowhere.txt: no such file"),
        (["nothing", STORE], "no such file or folder"),
        (["runs/demo", STORE, "--generate_sample=1"], "did you mean --generate_samples"),
    ],
)
def test_mistakes_are_a_line(there, words, said, capsys):
    with pytest.raises(SystemExit) as exit:
        command_line.run(evaluate.main, lambda: "", words)
    told = capsys.readouterr()
    assert exit.value.code == 2 and said in told.err and len(told.err.splitlines()) == 1


@pytest.mark.slow
def test_two_ranks_give_the_numbers_of_one(there, project, tmp_path):
    (tmp_path / "a.jsonl").write_text(lines(99))
    words = [
        "-m",
        "mamba_fsdp",
        "evaluate",
        "runs/demo",
        str(tmp_path / "a.jsonl"),
        "--seq_length=16",
        "--stride=5",
        "--batch_size=2",
        "--json",
        "--compare_baseline=exported/demo",
        "--generate_samples=1",
    ]
    environment = {**os.environ, "PYTHONPATH": str(project), "OMP_NUM_THREADS": "1"}
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "--standalone"]
    launchers = [[sys.executable], torchrun]
    one, two = (
        json.loads(
            subprocess.run(
                [*launcher, *words],
                cwd=there,
                capture_output=True,
                text=True,
                check=True,
                env=environment,
            ).stdout
        )
        for launcher in launchers
    )
    for found in (one, two):
        for told in found["data"].values():
            for numbers in told.values():
                numbers.pop("seconds")
    assert two["data"] == {
        label: {role: pytest.approx(numbers, rel=1e-6) for role, numbers in told.items()}
        for label, told in one["data"].items()
    }
    assert two["samples"] == one["samples"]
