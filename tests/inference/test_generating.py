"""Tests mamba_fsdp.inference.generate: the text that it yields for a stream of tokens, and the tokens of a prompt."""

from types import SimpleNamespace

import pytest
import torch

from mamba_fsdp.data.tokenizer import load_for_prompts, train
from mamba_fsdp.errors import UserError
from mamba_fsdp.inference import decoding, generate

pytestmark = pytest.mark.torch22


def test_a_character_of_several_tokens_is_yielded_when_it_is_complete(monkeypatch, tmp_path):
    """generate yields a character once all its tokens are known. It stops at the end-of-document token, which is not
    part of the text, and leaves out an incomplete last character."""
    # The vocabulary consists of the 256 bytes and the end-of-document token.
    train(["aaa"], 257).save(tmp_path)
    letters = load_for_prompts(tmp_path)
    model = SimpleNamespace(network=torch.nn.Linear(1, 1), tokenizer_path=tmp_path)
    for text, pieces in (
        ("aé日b", ["a", "", "é", "", "", "日", "b"]),
        ("a<|endoftext|>b", ["a"]),
        ("日", ["", "", "日"]),
    ):
        tokens = letters.encode(text)
        monkeypatch.setattr(decoding, "generate", lambda *_, tokens=tokens, **__: iter(tokens))
        assert [*generate.generate(model, generate.GenerationConfig("x"))] == pieces
    monkeypatch.setattr(decoding, "generate", lambda *_, **__: iter(tokens[:2]))
    assert "".join(generate.generate(model, generate.GenerationConfig("x"))) == ""
    with pytest.raises(UserError, match="invalid UTF-8 after 'x{20}';"):
        generate.generate(model, generate.GenerationConfig("x" * 99 + "\udcef"))


def test_text_without_transformers_equals_text_with_transformers(in_user_folder):
    from transformers import AutoTokenizer

    text = "def naïve 日本<|endoftext|>x"
    for folder in ("runs/demo/tokenizer", "exported/demo"):
        ours = load_for_prompts(folder)
        theirs = AutoTokenizer.from_pretrained(folder)
        ids = ours.encode(text)
        assert ids == theirs(text, add_special_tokens=False)["input_ids"]
        assert ours.decode(ids) == theirs.decode(ids) and ours.eos == theirs.eos_token_id
