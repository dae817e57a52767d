"""Tests `--help`, which shows the most important settings, `--help=all`, and `--help=TOPIC`, which searches the
settings."""

import dataclasses
import importlib
import re
import shlex
import subprocess
import sys

import pytest

from mamba_fsdp.__main__ import VERBS, overview, page_of
from mamba_fsdp.errors import UserError
from mamba_fsdp.fields import default, describe_type, format_value
from mamba_fsdp.settings.help import field_docs, help_query
from mamba_fsdp.settings.settings_page import USUAL, settings_page
from mamba_fsdp.settings.train_config import SECTIONS, all_settings


@pytest.fixture(autouse=True)
def columns(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")


def listed_settings(topic):
    """Returns the names of the settings on the help page of this topic, in order."""
    return re.findall(r"^  --(\w+)=", settings_page().text(topic), re.M)


def test_all_has_every_setting_with_its_meaning_and_bounds():
    page = "".join(settings_page().text("all").split())
    for section in SECTIONS.values():
        for leaf in dataclasses.fields(section):
            description = f"{field_docs(section)[leaf.name]} ({describe_type(leaf)})"
            description = f"--{leaf.name}={format_value(default(leaf))} {description}"
            assert "".join(description.split()) in page


def test_help_shows_at_most_twenty_existing_settings_in_the_order_of_the_sections():
    assert sorted(listed_settings("")) == sorted(USUAL.split()) and len(listed_settings("")) == 20
    assert {*listed_settings("")} < all_settings().keys()
    headings = re.findall(r"^(\w+): ", settings_page().text(""), re.M)
    assert headings == [*SECTIONS]


def test_no_line_is_wider_than_the_terminal(monkeypatch):
    pages = [settings_page(), overview()]
    for verb in VERBS:
        module = importlib.import_module(f"mamba_fsdp.verbs.{verb.replace('import', 'import_')}")
        pages.append(page_of(module))
    for columns in (80, 120, 300):
        monkeypatch.setenv("COLUMNS", str(columns))
        for page in pages:
            for topic in ("", "all"):
                text = page.text(topic)
                assert text.isascii() and max(map(len, text.splitlines())) <= min(columns, 100)


WORDS = {
    "batch size": "batch_size",
    "BATCH-SIZES": "batch_size",
    "sequence length": "seq_length",
    "dtype": "mixed_precision",
    "lr": "learning_rate",
    "max_seq_length": "seq_length",
    "output_dir": "save_ckpt_path",
    "epochs": "num_epochs",
    "wandb": "tracker",
    "gradient accumulation": "gradient_accumulation_steps",
    "--batch_size": "batch_size",
}


def test_a_topic_finds_its_setting_or_the_reason_why_there_is_none():
    for topic, first in WORDS.items():
        assert first in listed_settings(topic)[:2], topic
    page = settings_page().text("logical shards")
    assert page.startswith("logical shards is not a setting here: ")


OTHER_PROGRAMS = {  # {topic: part of the page of --help=TOPIC if this program has no such setting}
    "early": "early_stopping_patience is not a setting here: a run has its length; a file STOP",
    "patience": "STOP",
    "gpu": "./1.train.sbatch trains on all GPUs",
}


def test_a_topic_without_an_option_finds_a_setting_of_another_program():
    for topic, answer in OTHER_PROGRAMS.items():
        assert answer in " ".join(settings_page().text(topic).split()), topic


UNKNOWN = {
    "warmpu": "did you mean --help=warmup",
    **dict.fromkeys(["nosuch", "***", " ", "(", "\x1b[2J", "--", "\udcff", "x" * 3000], ""),
    "lerning_rat": "did you mean --help=learning_rate",
}


def test_an_unknown_topic_is_an_error_of_one_line():
    for topic, hint in UNKNOWN.items():
        with pytest.raises(UserError, match="no option matches; ") as caught:
            settings_page().text(topic)
        message = str(caught.value)
        assert hint in message and len(message.splitlines()) == 1


ASKED = {
    "--help": "",
    "help": "",
    "-h": "",
    "runs/a --help": "",
    "--help=": "",
    "--help=all": "all",
    "'--help=batch size'": "batch size",
    "--help batch size --seed=3": "batch size",
    "": None,
    "--helper=3": None,
}


def test_help_query_reads_the_topic():
    for line, topic in ASKED.items():
        assert help_query(shlex.split(line)) == topic, line


COMMANDS = (
    "training.py,get_dataset.py,-m mamba_fsdp,-m mamba_fsdp generate,-m mamba_fsdp.launch.plan"
)


@pytest.mark.parametrize("command", COMMANDS.split(","))
def test_help_imports_nothing_that_takes_long(project, command):
    code = (
        "import runpy, sys; sys.argv = sys.argv[1:] + ['--help']\n"
        "start = runpy.run_path if sys.argv[0].endswith('.py') else runpy.run_module\n"
        "name = sys.argv.pop(0) if sys.argv[0] == '-m' else None\n"
        "start(sys.argv[0], run_name='__main__')\n"
        "assert not {'torch', 'transformers', 'numpy', 'fire'} & set(sys.modules), 'heavy imports'"
    )
    subprocess.run([sys.executable, "-c", code, *command.split()], cwd=project, check=True)
