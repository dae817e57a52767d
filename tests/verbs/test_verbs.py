"""The verbs on what a training left, and the same from Python as README.md shows it."""

import json
import os
import re
import shutil
import subprocess
import sys

import pytest

from mamba_fsdp import command_line
from mamba_fsdp.data.store import TokenStore
from mamba_fsdp.errors import UserError
from mamba_fsdp.verbs import evaluate, export, generate, inspect
from tests.support.corpora import stored_documents

pytestmark = pytest.mark.torch22


def test_the_python_in_the_readme_runs_as_it_is_written(there, project, capsys):
    (code,) = re.findall(r"^```python\n(.*?)^```", (project / "README.md").read_text(), re.M | re.S)
    exec(compile(code, "README.md", "exec"), {})
    assert len([line for line in code.splitlines() if line.strip()]) <= 12
    text, numbers = capsys.readouterr().out.rsplit("\n", 2)[:2]
    assert len(text) > 10 and len(numbers.split()) == 2


def test_importing_the_package_imports_nothing_heavy(project):
    loaded = subprocess.run(
        [sys.executable, "-X", "importtime", "-c", "import mamba_fsdp"],
        capture_output=True,
        text=True,
        cwd=project,
    ).stderr
    assert "| mamba_fsdp\n" in loaded and not re.search(
        r"\| +(torch|numpy|tokenizers|yaml)\n", loaded
    )
    import mamba_fsdp

    assert all(callable(getattr(mamba_fsdp, name)) for name in mamba_fsdp.PUBLIC)
    with pytest.raises(AttributeError, match="has no attribute 'generates'"):
        _ = mamba_fsdp.generates


@pytest.mark.slow
def test_generate_imports_only_what_it_needs(there, project):
    """Transformers, sympy and torch's compiler took half of the time before the first token."""
    done = subprocess.run(
        [
            sys.executable,
            "-X",
            "importtime",
            "-m",
            "mamba_fsdp",
            "generate",
            "runs/demo",
            "--prompt=def",
            "--length=3",
        ],
        cwd=there,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(project)},
    )
    loaded = set(re.findall(r"\| +(\w+(?:\._dynamo)?)\n", done.stderr))
    assert done.stdout.startswith("def") and "torch" in loaded
    assert not loaded & {"transformers", "sympy", "torch._dynamo"}


def test_generate_continues_the_prompt_and_repeats_itself_for_equal_seeds(there, capsys):
    def text(model, **options):
        generate.main(model, "def naïve", length=20, **options)
        return capsys.readouterr().out

    assert text("runs/demo") == text("runs/demo") != text("runs/demo", seed=1)
    likeliest = text("runs/demo", temperature=0)
    assert likeliest == text("exported/demo", temperature=0) and re.match(
        "def naïve.{5}", likeliest, re.S
    )


def test_words_without_transformers_are_those_of_transformers(there):
    from transformers import AutoTokenizer

    from mamba_fsdp.data.tokenizer import load_words

    for folder in ("runs/demo/tokenizer", "exported/demo"):
        ours, theirs = load_words(folder), AutoTokenizer.from_pretrained(folder)
        ids = ours.encode("def naïve 日本<|endoftext|>x")
        assert ids == theirs("def naïve 日本<|endoftext|>x", add_special_tokens=False)["input_ids"]
        assert ours.decode(ids) == theirs.decode(ids) and ours.eos == theirs.eos_token_id


def test_a_prompt_in_another_encoding_is_one_line(project):
    done = subprocess.run(
        [sys.executable, "-m", "mamba_fsdp", "generate", "/nowhere", b"--prompt=na\xefve"],
        cwd=project,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2 and done.stderr.startswith(
        "error: --prompt: invalid UTF-8 behind 'na'; write it in "
    )
    assert len(done.stderr.splitlines()) == 1


def test_evaluate_says_what_it_measured(there, capsys):
    from mamba_fsdp.data.tokenizer import load_words

    evaluate.main("runs/demo", "data/builtin/validation", seq_length=32)
    said = capsys.readouterr().out
    assert [line.split()[0] for line in said.splitlines()] == [
        "tokens",
        "windows",
        "loss",
        "perplexity",
        "bits",
        "speed",
    ]
    store = TokenStore("data/builtin/validation")
    every = store.token_count - 1
    decode = load_words(store.tokenizer_path).decode
    words = sum(len(decode(document[:-1].tolist()).split()) for document in stored_documents(store))
    assert re.search(r"per token, [\d,.]+ per word \(([\d,]+) words", said)[1] in [
        f"{words - fewer:,}" for fewer in (0, 1)
    ]  # the first token is not predicted
    assert "\nwindows        32 tokens long, one every 32\n" in said
    assert said.startswith(f"tokens         {every:,} of {every:,}\n")
    evaluate.main("runs/demo", "data/builtin/validation", seq_length=32, limit=3)
    assert capsys.readouterr().out.startswith(f"tokens         96 of {every:,}\n")


def test_windows_of_any_length_are_evaluated(there, monkeypatch):
    """Longer than what is computed of at a time, and than the store."""
    from mamba_fsdp.verbs import loading

    whole = evaluate.evaluate(
        loading.load("runs/demo"), "data/builtin/validation", seq_length=10**12
    )
    monkeypatch.setitem(loading.POSITIONS, "cpu", 100)
    parts = evaluate.evaluate(
        loading.load("runs/demo"), "data/builtin/validation", seq_length=10**12
    )
    assert (
        parts.loss == pytest.approx(whole.loss, rel=1e-6)
        and parts.tokens == whole.tokens == whole.of
    )


def verify(path, capsys):
    """(exit code, what is said) of inspect PATH --verify."""
    with pytest.raises(SystemExit) as exit:
        command_line.run(inspect.main, lambda: "", [str(path), "--verify"])
    told = capsys.readouterr()
    return exit.value.code, told.out + told.err


@pytest.mark.parametrize(
    "place, damaged, said",
    [
        (
            "runs/demo",
            "checkpoints/step_00000002/rank_00000.safetensors",
            "broken: the content of rank_00000.safet",
        ),
        (
            "data/builtin",
            "validation/00000.bin",
            "error: .*validation/00000.bin: the content does not match its checksum",
        ),
    ],
)
def test_verify_reads_every_byte(place, damaged, said, there, tmp_path, capsys):
    copy = tmp_path / "copy"
    shutil.copytree(place, copy)
    code, told = verify(copy, capsys)
    assert (
        code == 0
        and told.count("  whole") + told.count("all bytes read, every file has its size and ch")
        == 2
    )
    data = bytearray((copy / damaged).read_bytes())
    data[-1] ^= 1
    (copy / damaged).write_bytes(data)
    code, told = verify(copy, capsys)
    assert code in (1, 2) and re.search(said, told), told


def test_verify_is_refused_where_it_means_nothing(there, capsys, tmp_path):
    for model in ("exported/demo", "runs/demo/pth/step_00000004"):
        code, told = verify(model, capsys)
        assert (
            code == 2
            and "--verify is for token stores, checkpoints and runs; this holds no checksums"
            in told
        )
    (tmp_path / "checkpoints").mkdir()
    assert verify(tmp_path, capsys)[0] == 2


def test_an_export_can_be_read_by_others_and_says_what_it_is(there, tmp_path):
    """Files as the umask says; a model card; what transformers' generate needs; nothing of a killed attempt."""
    (tmp_path / ".hf.0123456789ab.partial").mkdir()
    before = os.umask(0o027)
    try:
        export.main("runs/demo", str(tmp_path / "hf"))
        export.main("runs/demo/pth/step_00000004", str(tmp_path / "theirs"), format="state-spaces")
    finally:
        os.umask(before)
    assert sorted(os.listdir(tmp_path)) == ["hf", "theirs"]
    for folder in ("hf", "theirs"):
        assert {path.stat().st_mode & 0o777 for path in (tmp_path / folder).iterdir()} == {0o640}
    card = (tmp_path / "hf" / "README.md").read_text()
    assert (
        "parameters in float32: 2 layers mamba1, d_model\n16" in card
        and "AutoModelForCausalLM" in card
    )
    assert (
        "Trained for 4 steps on 256 tokens of builtin in sequences of 32" in card
        and str(there) not in card
    )
    card = (tmp_path / "theirs" / "README.md").read_text()
    assert "MambaLMHeadModel" in card and "How it was trained is not known" in card
    assert json.loads((tmp_path / "hf" / "generation_config.json").read_text()) == {
        "pad_token_id": 0,
        "eos_token_id": 0,
    }


def test_the_cards_code_runs(there, capsys, tmp_path):
    code = re.search(r"```python\n(.*?)```", (there / "exported/demo/README.md").read_text(), re.S)[
        1
    ]
    exec(code, {"FOLDER": str(there / "exported/demo")})
    assert capsys.readouterr().out.startswith("Once")


def test_a_store_of_another_vocabulary_is_refused(there):
    from mamba_fsdp.verbs.loading import load

    model = load("runs/demo")
    model.weights.config.vocab_size = 9
    with pytest.raises(UserError, match="they don't belong together"):
        evaluate.evaluate(model, "data/builtin/validation")
