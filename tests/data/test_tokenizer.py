"""Tests mamba_fsdp.data.tokenizer: tokenizers can be shared by threads, have an identity, and are loaded without
executing code in their folder."""

import codecs
import io
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, processors
from transformers import AutoTokenizer

from mamba_fsdp.data.tokenizer import (
    END_OF_TEXT,
    check_tokenizer,
    identities_in,
    identity_of,
    load,
    load_for_prompts,
)
from mamba_fsdp.errors import UserError

pytestmark = pytest.mark.torch22
THREADS = 8
ROUNDS = 2
SPELLED = "a page about <|endoftext|> and its use"


@pytest.fixture
def folder(tokenizer):
    """Returns the folder of a tokenizer that this program has saved."""
    return Path(tokenizer).parent


def test_eight_threads_share_one_tokenizer(tokenizer, texts):
    """Eight threads can use one tokenizer at the same time. Versions of the tokenizers library before 0.23 raise
    `Already borrowed` if one thread changes a setting while another thread encodes."""
    documents = [SPELLED, *texts]
    shared = load(tokenizer, END_OF_TEXT)
    expected = shared.encode_documents(documents)

    def use(number):
        for _ in range(ROUNDS):
            assert shared.encode_documents(documents) == expected
            one = documents[number]
            assert shared.encode(one) == expected[number]
            assert shared.decode(expected[number]) == one
            identity_of(shared.backend)

    with ThreadPoolExecutor(THREADS) as threads:
        list(threads.map(use, range(THREADS)))


def test_a_spelled_special_token_is_text_in_a_document_and_a_token_in_a_prompt(folder):
    """The characters of a special token are encoded as text in a document, and as the special token in a prompt. The
    identity of the tokenizer is the same for both purposes."""
    for_documents = load(str(folder))
    for_prompts = load_for_prompts(folder)
    (ids,) = for_documents.encode_documents([SPELLED])
    assert for_documents.eos not in ids
    assert for_documents.decode(ids) == SPELLED
    assert for_prompts.encode(SPELLED).count(for_prompts.eos) == 1
    assert for_documents.eos_token == for_prompts.eos_token == END_OF_TEXT
    assert for_documents.identity == for_prompts.identity


def merging(*merges):
    return Tokenizer(models.BPE({"a": 0, "b": 1, "c": 2, "ab": 3, "bc": 4}, list(merges)))


def test_equivalent_tokenizers_have_the_same_identity(folder, tmp_path):
    """The identity of a tokenizer does not depend on the program that saved it, or on tokens that it adds around a
    text. The identity depends on the merges."""
    one = merging(("a", "b"), ("b", "c"))
    same = merging(("a", "b"), ("b", "c"))
    same.decoder = decoders.ByteLevel()
    same.post_processor = processors.TemplateProcessing("a $A", special_tokens=[("a", 0)])
    same.enable_padding()
    same.enable_truncation(1)
    other = merging(("b", "c"), ("a", "b"))
    assert identity_of(one) == identity_of(same) != identity_of(other)
    AutoTokenizer.from_pretrained(folder).save_pretrained(tmp_path)
    identities = [*identities_in(folder), *identities_in(tmp_path)]
    assert identities == [load_for_prompts(folder).identity] * 4
    assert list(identities_in(None)) == []


def test_only_known_identities_can_differ():
    """If the known identities of two tokenizers differ, the error contains both paths. An unknown identity is
    accepted."""
    check_tokenizer("here", "ids:1", "there", ["ids:2", "ids:1"])
    check_tokenizer("here", "", "there", ["ids:2"])
    check_tokenizer("here", "ids:1", "there", ["unknown"])
    with pytest.raises(UserError, match=r"here and there have .*\(ids:1, ids:2\).*--allow_other"):
        check_tokenizer("here", "ids:1", "there", ["ids:2"])


@pytest.mark.parametrize(
    "eos_token, problem",
    [
        ("<end>", "its vocabulary lacks the eos_token '<end>'"),
        ("", "its files do not name an eos_token"),
    ],
)
def test_a_tokenizer_without_the_named_eos_is_refused(tokenizer, eos_token, problem):
    with pytest.raises(UserError, match=f"{problem}; name the token"):
        load(tokenizer, eos_token)


@pytest.mark.parametrize("load", [load, load_for_prompts])
def test_a_tokenizer_folder_with_code_runs_none_of_it(load, tmp_path, monkeypatch):
    """Loading a tokenizer never executes code in its folder, even if `yes |` answers every question."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n" * 100))
    (tmp_path / "evil").mkdir()
    (tmp_path / "evil" / "tokenization_evil.py").write_text(
        "open('owned', 'w')\nfrom transformers import PreTrainedTokenizerFast as Evil\n"
    )
    fields = {
        "tokenizer_class": "Evil",
        "auto_map": {"AutoTokenizer": [None, "tokenization_evil.Evil"]},
    }
    (tmp_path / "evil" / "tokenizer_config.json").write_text(json.dumps(fields))
    with pytest.raises(UserError, match="tokenizer evil: can't be loaded"):
        load("evil")
    assert not list(identities_in(Path("evil")))
    assert not (tmp_path / "owned").exists()


@pytest.mark.parametrize("stored", [True, False])
@pytest.mark.parametrize("configured", [None, True, False])
def test_a_tokenizer_json_is_used_unchanged(tokenizer, tmp_path, stored, configured):
    """A tokenizer.json is used unchanged, whatever the name of its folder and the value of add_prefix_space in its
    tokenizer_config.json. The saved copy also gives the same tokens in transformers."""
    source = tmp_path / "my-t5-tokenizer"
    source.mkdir()
    content = json.loads(Path(tokenizer).read_text())
    content["pre_tokenizer"] = {"type": "ByteLevel", "add_prefix_space": stored, "use_regex": True}
    content["pre_tokenizer"]["trim_offsets"] = True
    (source / "tokenizer.json").write_text(json.dumps(content))
    fields = {"eos_token": END_OF_TEXT, "add_prefix_space": configured}
    known = {name: value for name, value in fields.items() if value is not None}
    (source / "tokenizer_config.json").write_text(json.dumps(known))
    expected = Tokenizer.from_str(json.dumps(content)).encode("a text").ids
    loaded = load(str(source))
    assert loaded.encode("a text") == load_for_prompts(source).encode("a text") == expected
    loaded.save(tmp_path / "saved")
    again = AutoTokenizer.from_pretrained(tmp_path / "saved")
    assert again("a text")["input_ids"] == expected
    assert len(again) == len(content["model"]["vocab"])


def test_a_byte_order_mark_is_refused_with_the_command_that_removes_it(tokenizer, tmp_path):
    file = tmp_path / "my tokenizer" / "tokenizer.json"
    file.parent.mkdir()
    file.write_bytes(codecs.BOM_UTF8 + Path(tokenizer).read_bytes())
    for path in (file, file.parent):
        with pytest.raises(
            UserError, match="begins with a byte order mark.*; remove it: "
        ) as error:
            load(str(path), END_OF_TEXT)
    subprocess.run(str(error.value).rpartition("remove it: ")[2], shell=True, check=True)
    assert load(str(file), END_OF_TEXT).encode("a")
