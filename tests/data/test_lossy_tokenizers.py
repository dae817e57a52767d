"""Tests that an import reports what a tokenizer changes in texts, and that the tokenizer of a store does not add
tokens that its documents do not have."""

import json
import re

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import AutoTokenizer

from mamba_fsdp.data.store import TokenStore
from mamba_fsdp.data.tokenizer import load_for_prompts
from mamba_fsdp.errors import UserError

pytestmark = pytest.mark.torch22
TEXT = "The quick brown fox, caf\u00e9 \ufb01ne; " + "some more plain words " * 9
END, BOS = "</s>", "<s>"


def byte_level(**model):
    """Returns a tokenizer of bytes with two merges, and with the tokens END and BOS."""
    letters = [END, BOS, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    vocabulary = {letter: number for number, letter in enumerate([*letters, "re", "rd"])}
    tokenizer = Tokenizer(models.BPE(vocabulary, [("r", "e"), ("r", "d")], **model))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def normalized(*steps):
    tokenizer = byte_level()
    tokenizer.normalizer = normalizers.Sequence(list(steps))
    return tokenizer


def of_words(*words):
    tokenizer = Tokenizer(
        models.WordLevel({END: 0, **{w: i + 1 for i, w in enumerate(words)}}, "?")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return tokenizer


def adding(template):
    tokenizer = byte_level()
    tokenizer.add_special_tokens([BOS, END])
    special = [(token, tokenizer.token_to_id(token)) for token in (BOS, END)]
    tokenizer.post_processor = processors.TemplateProcessing(template, special_tokens=special)
    return tokenizer


REPORTED = {  # {case: (tokenizer, regular expression of the printed message)}
    "bytes": (byte_level(), ""),
    "lowercase": (normalized(normalizers.Lowercase()), r"warning: .*'The quick br.*'the quick"),
    "letters": (normalized(normalizers.Replace("o", "")), "warning: the tokenizer loses"),
    "dropout": (byte_level(dropout=0.5), "drops 50% of its merges at random; this is switched off"),
    "bos": (adding(f"{BOS} $A"), "adds <s> to each text; .*--bos=true keeps"),
    "eos": (adding(f"$A {END}"), "adds </s> to each text; .* exports adds no tokens\n"),
}
REFUSED = {
    "no unknown": (of_words("The"), "can't encode this text .*Missing"),
    "unknown": (of_words("?", "The"), r"9\d.\d\d% of .*--lossy_tokenizer=true$"),
}


def saved(folder, tokenizer, **fields):
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END, **fields}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def imported(prepare, folder, tokenizer, **given):
    """Imports TEXT. Returns (the tokens in its store, the path of the store's tokenizer)."""
    (folder / "text.txt").write_text(TEXT)
    prepare(folder / "text.txt", folder / "out", tokenizer=str(tokenizer), eos_token=END, **given)
    store = TokenStore(folder / "out/train")
    return store.read(0, store.token_count).tokens.tolist(), store.tokenizer_path


@pytest.mark.parametrize("case", REPORTED)
def test_a_warning_reports_what_a_tokenizer_loses_or_adds(case, prepare, tmp_path, capsys):
    tokenizer, message = REPORTED[case]
    imported(prepare, tmp_path, saved(tmp_path / "tokenizer", tokenizer))
    output = capsys.readouterr().out
    assert re.search(message, output)
    assert ("warning:" in output) == ("warning:" in message)


@pytest.mark.parametrize("case", REFUSED)
def test_a_tokenizer_that_loses_most_of_the_text_is_refused(case, prepare, tmp_path):
    tokenizer, message = REFUSED[case]
    with pytest.raises(UserError, match=message):
        imported(prepare, tmp_path, saved(tmp_path / "tokenizer", tokenizer))


def test_a_lossy_tokenizer_can_be_allowed(prepare, tmp_path, capsys):
    tokenizer, _ = REFUSED["unknown"]
    folder = saved(tmp_path / "tokenizer", tokenizer)
    imported(prepare, tmp_path, folder, lossy_tokenizer=True)
    assert "warning" in capsys.readouterr().out


def test_dropout_of_a_tokenizer_is_switched_off(prepare, tmp_path):
    folder = saved(tmp_path / "tokenizer", byte_level(dropout=0.5))
    ids, place = imported(prepare, tmp_path, folder)
    assert ids == [*byte_level().encode(TEXT).ids, 0]
    assert AutoTokenizer.from_pretrained(place).encode(TEXT) == ids[:-1]


@pytest.mark.parametrize("bos", [False, True])
@pytest.mark.parametrize("class_name", ["PreTrainedTokenizerFast", "LlamaTokenizerFast"])
def test_a_tokenizer_adds_the_bos_that_documents_have(bos, class_name, prepare, tmp_path):
    """With --bos=true, each document begins with one bos, and the store's tokenizer adds exactly one bos to a text,
    both in transformers and in the prompts of this program. With --bos=false, neither documents nor prompts have a
    bos."""
    fields = {"tokenizer_class": class_name, "bos_token": BOS, "add_bos_token": True}
    folder = saved(tmp_path / "tokenizer", adding(f"{BOS} $A"), **fields)
    ids, place = imported(prepare, tmp_path, folder, bos=bos)
    assert ids[:-1].count(1) == ids.count(1) == bos == (ids[0] == 1)
    assert ids[-1] == 0
    assert AutoTokenizer.from_pretrained(place).encode(TEXT) == ids[:-1]
    assert load_for_prompts(place).encode(TEXT) == ids[:-1]


def test_a_tokenizer_without_bos_is_refused_with_bos(prepare, tmp_path):
    folder = saved(tmp_path / "tokenizer", byte_level())
    with pytest.raises(UserError, match="--bos=true .* the tokenizer has no bos"):
        imported(prepare, tmp_path, folder, bos=True)
