"""Tests mamba_fsdp.data.text, which counts the words and bytes in the text of predicted tokens."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mamba_fsdp.data import text
from mamba_fsdp.data.loader import evaluation_windows
from mamba_fsdp.data.store import TokenStore
from tests.support.corpora import write_records, write_store


@given(st.integers(2, 300), st.integers(2, 20), st.data())
def test_windows_together_predict_every_token_but_the_first(token_count, window, data):
    stride = data.draw(st.integers(1, window))
    windows = evaluation_windows(token_count, window, stride, limit=0)
    assert text.predicted_spans(windows, window, stride, token_count) == [(1, token_count)]


def test_some_windows_predict_spans():
    """With a limit, the evaluated windows are spread evenly over the text. Each window except the first predicts its
    last `stride` tokens."""
    windows = evaluation_windows(token_count=20, seq_length=8, stride=3, limit=3)
    assert windows.tolist() == [0, 1, 3]
    assert text.predicted_spans(windows, 8, 3, 20) == [(1, 12), (15, 18)]


def test_counted_words_and_bytes_equal_those_of_the_text(prepare, tmp_path, monkeypatch):
    """The counted words and bytes are those of the original texts, also if the tokens are decoded in several chunks.
    Eos tokens are not words."""
    monkeypatch.setattr(text, "TOKENS_PER_CHUNK", 25)
    texts = ["naïve 日本語 words", "two\nlines", "x"]
    write_records(tmp_path / "a.jsonl", texts)
    prepare(tmp_path / "a.jsonl", tmp_path / "out")
    store = TokenStore(tmp_path / "out/train")
    words = sum(len(each.split()) for each in texts)
    size = sum(len(each.encode()) for each in texts)
    whole = [(0, store.token_count)]
    assert text.count_words_and_bytes(store, whole) == (words, size)


def test_bits_per_byte_need_a_text(tmp_path):
    store = write_store(tmp_path, [[1, 2]], vocab_size=9, eos=0, tokenizer="")
    assert text.count_words_and_bytes(store, [(0, 3)]) == (0, 0)
    assert text.bits_per_byte(1.0, 3, 0) is None
    assert text.bits_per_byte(math.log(2), 6, 3) == pytest.approx(2)
