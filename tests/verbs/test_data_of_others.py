"""inspect on data in other formats."""

import pytest

from mamba_fsdp import command_line
from mamba_fsdp.data.store import TokenStore
from mamba_fsdp.verbs import inspect
from tests.support.corpora import stored_documents
from tests.support.foreign_files import write_fms, write_nanogpt, write_rows


@pytest.fixture
def told(capsys):
    """told(word, ...) -> (exit code, what is said) of inspect with these words."""

    def run(*words):
        with pytest.raises(SystemExit) as exit:
            command_line.run(inspect.main, lambda: "", [str(word) for word in words])
        said = capsys.readouterr()
        return exit.value.code, said.out + said.err

    return run


@pytest.fixture
def tree(there, tmp_path):
    """The documents of data/builtin/validation as fms has them."""
    write_fms(
        tmp_path / "tree" / "x.arrow",
        [
            document[:-1].tolist()
            for document in stored_documents(TokenStore("data/builtin/validation"))
        ],
    )
    return tmp_path / "tree"


def test_inspect_says_what_data_holds(tree, told):
    store = TokenStore("data/builtin/validation")
    highest = int(store.read(0, store.token_count).tokens.max())
    code, said = told(tree, "--eos_token=0", "--tokenizer=data/builtin/train/tokenizer")
    assert code == 0
    for words in (
        f"tokens         {store.token_count:,} in {store.document_count:,} documents",
        f"added: {store.document_count:,}",
        f"ids            0 to {highest} (all of it)",
        "fms",
        "at 0  ",
        "def line_",
    ):
        assert words in said, said
    assert "beware" not in said
    code, said = told(tree)
    assert (
        code == 0
        and "beware         which token ends documents is not known: --eos_token=ID" in said
    )


def test_inspect_names_ids_beyond_the_vocabulary(there, tmp_path, told):
    write_rows(tmp_path / "rows", [[1, 2, 300]] * 9)
    code, said = told(tmp_path / "rows", "--tokenizer=data/builtin/train/tokenizer")
    assert code == 0 and "beware         token id 300 is not below the vocabulary's 300" in said


def test_inspect_reads_samples_of_large_data_and_with_verify_all(tmp_path, told, monkeypatch):
    """The highest id stands where no sample falls; memory holds a window at a time."""
    monkeypatch.setattr(inspect, "WINDOW", 10)
    write_nanogpt(tmp_path / "a.bin", [1] * 1015 + [9] + [1] * 984)
    code, said = told(tmp_path / "a.bin", "--eos_token=9")
    assert (
        code == 0
        and "1 to 1 (of 640 tokens spread over it)" in said
        and "the longest at least" in said
    )
    code, said = told(tmp_path / "a.bin", "--eos_token=9", "--verify")
    assert "1 to 9 (all of it)" in said and "the longest 1,016 tokens; 2 begin in it" in said


@pytest.mark.parametrize(
    "name, message",
    [
        (
            "a.jsonl",
            "a.jsonl: text (a.jsonl), to be tokenised once before it is read:\n  .venv/bin/python get_dataset.py ",
        ),
        ("nothing", "there is no such file or folder"),
    ],
)
def test_inspect_says_what_to_do(tmp_path, told, name, message):
    (tmp_path / "a.jsonl").write_text('{"text": "a"}')
    code, said = told(tmp_path / name)
    assert code == 2 and message in said
