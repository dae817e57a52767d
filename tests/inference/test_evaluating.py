"""Tests `evaluate`: its sliding windows, its counts of words and bytes, and that its results do not depend on the
number of ranks."""

import dataclasses
import json
import math
from functools import partial

import numpy as np
import pytest
import torch

import mamba_fsdp
from mamba_fsdp.data import text, tokenizer
from mamba_fsdp.data.store import TokenStore
from mamba_fsdp.data.tokenizer import load_for_prompts
from mamba_fsdp.errors import UserError
from mamba_fsdp.inference import loading
from mamba_fsdp.verbs import evaluate, export
from tests.support import forked
from tests.support.corpora import stored_documents

STORE = "data/builtin/validation"
pytestmark = pytest.mark.torch22


@pytest.fixture
def run(in_user_folder, answer):
    """Returns a function run(*arguments), which runs `evaluate` and returns (exit code, stdout, stderr)."""
    return partial(answer, evaluate)


@pytest.fixture
def model(in_user_folder):
    return loading.load("runs/demo")


@pytest.mark.parametrize("stride", [32, 20, 7])
@torch.no_grad()
def test_each_token_is_scored_once_with_enough_context(model, stride):
    window = 32
    store = TokenStore(STORE)
    tokens = torch.from_numpy(store.read(0, store.token_count).tokens.astype(np.int64))
    total = 0.0
    scored = 1  # the first token is never predicted
    # The expected loss is computed as in the page "Perplexity of fixed-length models" of the transformers
    # documentation.
    for start in range(0, len(tokens), stride):
        end = min(start + window + 1, len(tokens))
        logits = model.network(tokens[None, start : end - 1])[0].float().log_softmax(-1)
        for at in range(scored, end):
            assert start == 0 or at - start > window - stride
            total -= float(logits[at - start - 1, tokens[at]])
        scored = end
        if end == len(tokens):
            break
    found = mamba_fsdp.evaluate(model, STORE, seq_length=window, stride=stride)
    assert found.tokens == scored - 1 == len(tokens) - 1
    assert (found.window, found.stride) == (window, stride)
    assert found.loss == pytest.approx(total / found.tokens, rel=1e-5)


def test_windows_are_as_long_as_the_sequences_of_the_training(model, run):
    """By default, windows are as long as the sequences of the training. If that length is unknown, they have 2,048
    tokens, or as many as the store can predict."""
    assert mamba_fsdp.evaluate(model, STORE).window == model.weights.seq_length == 32
    model.weights.seq_length = None
    store = TokenStore(STORE)
    assert mamba_fsdp.evaluate(model, STORE).window == min(2048, store.token_count - 1)


def test_words_and_bytes_are_counted_in_the_predicted_text(model, monkeypatch):
    """Words and bytes are counted in the text of the predicted tokens. The counts do not depend on the windows or on
    the number of tokens that are decoded at a time."""
    whole = mamba_fsdp.evaluate(model, STORE, seq_length=32)
    store = TokenStore(STORE)
    decode = load_for_prompts(model.tokenizer_path).decode
    texts = [decode(document[:-1].tolist()) for document in stored_documents(store)]
    words = sum(len(text.split()) for text in texts)
    assert words - 1 <= whole.words <= words  # the first token is not predicted
    assert whole.word_perplexity == pytest.approx(math.exp(whole.loss * whole.tokens / whole.words))
    bits = whole.loss * whole.tokens / math.log(2)
    assert whole.bits_per_byte == pytest.approx(bits / whole.bytes)
    monkeypatch.setattr(text, "TOKENS_PER_CHUNK", store.token_count // 3)
    again = mamba_fsdp.evaluate(model, STORE, seq_length=32, stride=8)
    assert again.bytes == whole.bytes and again.loss != whole.loss
    # The store contains a single document, which is now decoded in several chunks. A word that is cut between two
    # chunks counts twice.
    assert whole.words <= again.words <= whole.words + 3
    windows = mamba_fsdp.evaluate("runs/demo", STORE, seq_length=32, stride=8, limit=9)
    assert windows.tokens == 32 + 8 * 8 and windows.words < whole.words


def test_data_with_another_tokenizer_or_vocabulary_is_an_error(model, run, tmp_path):
    export.main("runs/demo", str(tmp_path / "theirs"), export.ExportConfig())
    tokenizer.train(["def other words"], 257).save(tmp_path / "theirs")
    code, _, err = run(tmp_path / "theirs", STORE)
    assert code == 2 and "different tokenizers" in err
    with pytest.raises(UserError, match="is longer than --seq_length=8"):
        mamba_fsdp.evaluate(model, STORE, seq_length=8, stride=9)
    model.weights.config = dataclasses.replace(model.weights.config, vocab_size=9)
    with pytest.raises(UserError, match="import the data with the model's tokenizer"):
        mamba_fsdp.evaluate(model, STORE)


@pytest.mark.slow
def test_two_ranks_have_the_results_of_one(in_user_folder, run):
    """Two ranks have the results of one rank. With --json, stdout contains only JSON, and the table is printed to
    stderr."""
    arguments = [str(in_user_folder / "runs/demo"), str(in_user_folder / STORE)]
    arguments += ["--seq_length=16", "--stride=5", "--batch_size=2", "--limit=40", "--json"]
    _, alone, table = run(*arguments)
    assert f"model          {arguments[0]}" in table and "\nloss           " in table
    together = forked.run_ranks(2, ["evaluate", *arguments], program=("-m", "mamba_fsdp"))
    found = []
    for output in (alone, together[together.index("{\n") :]):
        ((_, result),) = json.loads(output)["data"].items()
        result.pop("seconds")
        found.append(result)
    assert found[1] == pytest.approx(found[0], rel=1e-6)
