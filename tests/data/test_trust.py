"""Loading a tokenizer never runs code that lies beside it."""

import json
import re
import subprocess
import sys

import pytest

from tests.support.corpora import ROOT


@pytest.mark.parametrize("words", [["get_dataset.py", "in.txt", "out", "--tokenizer=evil"]])
def test_a_tokenizer_folder_with_code_runs_none_of_it(tmp_path, words):
    """Also where stdin answers yes to whatever is asked."""
    (tmp_path / "evil").mkdir()
    (tmp_path / "in.txt").write_text("text")
    (tmp_path / "evil" / "tokenization_evil.py").write_text(
        "open('owned', 'w')\nfrom transformers import PreTrainedTokenizerFast as Evil\n"
    )
    fields = {
        "tokenizer_class": "Evil",
        "auto_map": {"AutoTokenizer": [None, "tokenization_evil.Evil"]},
    }
    (tmp_path / "evil" / "tokenizer_config.json").write_text(json.dumps(fields))
    done = subprocess.run(
        [sys.executable, ROOT / words[0], *words[1:]],
        cwd=tmp_path,
        input="y\n" * 100,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2 and done.stderr.startswith("error: tokenizer evil: can't be loaded")
    assert not (tmp_path / "owned").exists()


def test_every_call_of_transformers_says_so():
    """What a program is given to load, it loads without code."""
    calls = []
    for path in [*ROOT.glob("*.py"), *ROOT.glob("mamba_fsdp/**/*.py")]:
        text = path.read_text()
        for match in re.finditer(r"Auto\w+\.(from_pretrained|from_config)\b", text):
            calls.append((path.name, text[match.start() : match.start() + 200]))
    calls = [
        (name, call)
        for name, call in calls
        if not call.startswith("AutoTokenizer.from_pretrained takes")
    ]
    assert calls
    assert not [name for name, call in calls if "trust_remote_code=False" not in call]
