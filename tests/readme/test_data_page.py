"""docs/data.md is true: each command in it works on data of the formats that it names."""

import re
import shlex

import numpy as np
import pytest

from mamba_fsdp import command_line
from mamba_fsdp.data import tokenizer
from mamba_fsdp.verbs import inspect
from tests.support import foreign_files

TINY = {
    "d_model": 16,
    "n_layer": 1,
    "vocab_size": 300,
    "d_state": 4,
    "seq_length": 32,
    "batch_size": 2,
    "num_steps": 2,
    "eval_interval": 0,
    "mixed_precision": "fp32",
    "kernels": "reference",
}


@pytest.fixture
def page(project):
    return (project / "docs" / "data.md").read_text()


@pytest.fixture(scope="session")
def fsx(tmp_path_factory):
    """What the page calls /fsx: data of several formats, and a tokenizer."""
    folder = tmp_path_factory.mktemp("fsx")
    data, generator = folder / "data", np.random.default_rng(0)
    documents = [
        generator.integers(0, 256, size).tolist() for size in generator.integers(0, 200, 60)
    ]
    foreign_files.write_fms(data / "code" / "lang=c" / "0.arrow", documents)
    foreign_files.write_rows(data / "books", documents)
    foreign_files.write_rows(
        data / "blocks", np.reshape(sum(documents, [])[:3200], (100, 32)).tolist()
    )
    (data / "owt").mkdir()
    for name in ("train", "val"):
        foreign_files.write_nanogpt(data / "owt" / f"{name}.bin", sum(documents, []))
    (data / "web").mkdir()
    foreign_files.write_megatron(data / "web" / "web_text_document", documents)
    tokenizer.train(["some text"], 300).save(folder / "tokenizers" / "mine")
    return folder


def commands(page):
    return [
        line
        for block in re.findall(r"^```sh\n(.*?)^```", page, re.M | re.S)
        for line in block.splitlines()
    ]


def test_there_are_commands(page):
    assert len(commands(page)) >= 5


@pytest.mark.slow
def test_every_command_works(page, fsx, tmp_path, capsys):
    from config import resolve
    from mamba_fsdp.train.run import run_training

    for number, command in enumerate(commands(page)):
        program, *words = shlex.split(command.replace("/fsx", str(fsx)))
        if program == "./1.train.sbatch":
            run = tmp_path / str(number)
            given = {
                **TINY,
                "save_ckpt_path": run,
                **dict(word.removeprefix("--").split("=", 1) for word in words),
            }
            run_training(
                resolve.resolve_settings({name: str(value) for name, value in given.items()})[0]
            )
            assert (run / "tokenizer").is_dir() == ("--tokenizer" in command)
        elif "convert" not in words:  # which test_writing.py runs
            assert program == ".venv/bin/python" and words[:3] == ["-m", "mamba_fsdp", "inspect"]
            with pytest.raises(SystemExit) as exit:
                command_line.run(inspect.main, lambda: "", words[3:])
            assert exit.value.code == 0
    assert "finished" in capsys.readouterr().out


def test_the_settings_it_names_exist(page):
    from config.train_config import setting_names

    named = set(re.findall(r"--(\w+)", page))
    assert named <= {*setting_names(), "verify", "format", "block", "data_path"}, named - set(
        setting_names()
    )
