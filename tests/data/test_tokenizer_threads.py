"""Threads share one tokenizer: each gets what one alone gets, and nothing any of them calls writes to it."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from mamba_fsdp.data.tokenizer import END_OF_TEXT, identity_of, load, load_words, train
from tests.support.corpora import make_texts

pytestmark = pytest.mark.torch22
THREADS = 8
ROUNDS = 2
SPELLED = "a page about <|endoftext|> and its use"


@pytest.fixture
def saved(texts, tmp_path):
    """The folder of a tokenizer that is trained on `texts`."""
    train(texts, 300).save(tmp_path / "tokenizer")
    return tmp_path / "tokenizer"


@pytest.fixture
def documents():
    """Texts that take a thread so long that others call meanwhile."""
    return [SPELLED, *make_texts(60)]


def test_eight_threads_share_one_tokenizer(saved, documents):
    """Before version 0.23 the tokenizers library raises `Already borrowed` where one thread changes a setting while
    another encodes."""
    tokenizer = load(str(saved / "tokenizer.json"), END_OF_TEXT)
    expected = tokenizer.encode_documents(documents)

    def use(number):
        for _ in range(ROUNDS):
            assert tokenizer.encode_documents(documents) == expected
            one = documents[number]
            assert tokenizer.encode(one) == expected[number]
            assert tokenizer.decode(expected[number]) == one
            identity_of(tokenizer.backend)

    with ThreadPoolExecutor(THREADS) as threads:
        list(threads.map(use, range(THREADS)))


def test_a_spelled_special_token_is_text_in_a_document_and_a_token_in_a_prompt(saved):
    """Both have one identity, which depends on neither."""
    for_documents = load(str(saved / "tokenizer.json"), END_OF_TEXT)
    for_prompts = load_words(saved)
    (ids,) = for_documents.encode_documents([SPELLED])
    assert for_documents.encode(SPELLED) == ids
    assert for_documents.eos not in ids
    assert for_documents.decode(ids) == SPELLED
    assert for_prompts.encode(SPELLED).count(for_prompts.eos) == 1
    assert for_documents.identity == for_prompts.identity
