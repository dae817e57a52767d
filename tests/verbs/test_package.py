"""Tests the functions of the package mamba_fsdp: names, signatures, errors, and their use in notebooks."""

import inspect
import os
import pydoc
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import mamba_fsdp
from mamba_fsdp.errors import UserError
from tests.support.corpora import write_store


def python(code, folder, project, **environment):
    kept = {
        name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_"))
    }
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=folder,
        env={**kept, "PYTHONPATH": str(project), **environment},
        capture_output=True,
        text=True,
    )


def test_the_package_lists_its_functions_with_their_purposes():
    public = {name for name in dir(mamba_fsdp) if not name.startswith("_")}
    verbs = {"tokenize", "train", "generate", "evaluate", "inspect", "report", "export"}
    assert public == {"load", "batches", *verbs}
    for name in public:
        function = getattr(mamba_fsdp, name)
        assert callable(function) and function.__doc__ and inspect.signature(function).parameters
    assert "length: Maximum number of tokens" in mamba_fsdp.generate.__doc__
    assert "Calling it again with the same settings resumes" in pydoc.render_doc("mamba_fsdp.train")
    with pytest.raises(AttributeError, match="has no attribute 'generates'"):
        _ = mamba_fsdp.generates


MISTAKES = [
    ("load", {"modelname": "x"}, "^modelname: there is no such option; did you mean model_name.$"),
    ("batches", {"dataset_path": "a", "seq_length": 0}, "^seq_length=0: must be at least 1$"),
    ("generate", {"model": "a", "prompt": ["x", "y"]}, "^prompt=.* expected one value$"),
    ("batches", {}, r"missing a required argument: 'dataset_path'; see help\(mamba_fsdp.batches"),
    ("train", {"num_stepss": 3}, r"^num_stepss: .* \(in the call\); did you mean num_steps.$"),
    ("load", {"source": "~/no-such-run"}, "^/.*/no-such-run: there is no such file or folder"),
    ("evaluate", {"model": "a", "data": ["text"]}, "^data: expected a path or a name, not list"),
    (
        "evaluate",
        {"model": 3, "data": "a"},
        "^model: expected a path or the result of mamba_fsdp.load",
    ),
    ("load", {"source": "a", "reset_at_documents": "no"}, "expected True or False, not str"),
    ("train", {"config": {"num_steps": 3}}, "^config: expected a path or a name, not dict"),
    ("train", {"position_window": 5}, r"leave it out \(in the call\)$"),
]


@pytest.mark.parametrize("name, words, message", MISTAKES)
def test_a_wrong_argument_is_refused_by_its_name(name, words, message):
    with pytest.raises(UserError, match=message) as caught:
        getattr(mamba_fsdp, name)(**words)
    assert len(str(caught.value).splitlines()) == 1


def test_a_notebook_can_tokenize_train_and_export_without_a_shell(in_user_folder, tmp_path, capsys):
    """The functions of the package accept a Path, and return the path of what they have made."""
    store = mamba_fsdp.tokenize(Path("a.txt"), tmp_path / "data", tokenizer="train:300")
    mamba_fsdp.inspect(store, verify=True)
    assert "verified" in capsys.readouterr().out
    page = mamba_fsdp.report(Path("runs/demo"), out=str(tmp_path))
    made = mamba_fsdp.export(Path("runs/demo"), tmp_path / "out", format="pth")
    assert (page, made) == (tmp_path / "report.html", tmp_path / "out")
    assert page.exists() and made.is_dir()


def test_training_in_a_thread_is_refused():
    found = []

    def train():
        try:
            mamba_fsdp.train(use_dummy_dataset=True)
        except UserError as error:
            found.append(str(error))

    thread = threading.Thread(target=train)
    thread.start()
    thread.join()
    assert "main thread" in found[0]


def test_the_import_is_light_and_its_threads_spin_for_a_moment(project, tmp_path):
    code = (
        "import mamba_fsdp, os, sys; print(os.environ.get('GOMP_SPINCOUNT'), "
        "*{'torch', 'numpy', 'tokenizers', 'yaml'} & {*sys.modules})"
    )
    assert python(code, tmp_path, project).stdout == "30000\n"
    assert python(code, tmp_path, project, OMP_WAIT_POLICY="ACTIVE").stdout == "None\n"


def test_a_program_may_end_with_its_batches_half_read(project, tmp_path):
    """The threads of `batches` end with the program, before the interpreter removes the modules that they need."""
    write_store(tmp_path / "store", [range(1, 60)] * 4, vocab_size=64, eos=0, tokenizer="none")
    code = (
        "import atexit, threading, mamba_fsdp; "
        "batches = mamba_fsdp.batches('store', seq_length=8, batch_size=1); next(batches); "
        "atexit._run_exitfuncs(); print(threading.active_count())"
    )
    ended = python(code, tmp_path, project)
    assert (ended.stdout, ended.stderr) == ("1\n", "")


@pytest.mark.parametrize("name", ["load", "generate", "batches", "export ."])
def test_the_traceback_of_a_mistake_ends_at_the_line_of_the_user(name):
    """The traceback of a user error contains only the frame of the caller and the frame that raises, because a notebook
    would show all internal ones."""
    function, *others = name.split()
    with pytest.raises(UserError) as caught:
        getattr(mamba_fsdp, function)("/nowhere/model", *others)
    assert len(caught.traceback) == 2
    assert caught.value.__cause__ is None and caught.value.__suppress_context__


def test_help_lists_the_functions_with_their_signatures():
    text = pydoc.render_doc(mamba_fsdp, renderer=pydoc.plaintext)
    for name in mamba_fsdp.PUBLIC:
        assert f"\n    {name}(" in text
