"""Tests mamba_fsdp.reporting.console: permanent lines and the live line below them, with and without a terminal, and
after the reader has exited."""

import io
import subprocess
import sys

import pytest

from mamba_fsdp.reporting.console import Console, describe_share, format_json, print_field
from tests.support.terminal import Terminal, drawings

LONG = "step  123456/1000000  loss  3.2500  lr 3.00e-04  1,214,000 tok/s  MFU 41.2%  left 4 days, 4:02:05"


def test_a_plain_line_per_report_without_a_terminal(monkeypatch):
    """Without a terminal, a Console prints only permanent lines, unchanged. On other ranks and without stdout, it
    prints nothing."""
    monkeypatch.setattr(sys, "stdout", None)
    Console().print_line("step 19")
    stream = io.StringIO()
    Console(enabled=False, stream=stream).print_line("step 19")
    console = Console(stream=stream)
    console.show_progress("step 19")
    console.print_line("step 20")
    console.show_progress("validation 3/16")
    console.print_line("data       " + "word " * 40)
    assert stream.getvalue() == "step 20\ndata       " + "word " * 40 + "\n"


def test_control_characters_are_shown_on_a_terminal_and_stay_in_files(monkeypatch):
    """Control characters are escaped on a terminal, and unchanged in a file. print_field escapes them in both cases,
    and always prints one line."""
    evil = "a\x1b]0;owned\x07\x9b2J\r\n\tb"
    for is_terminal, expected in (
        (True, r"a\x1b]0;owned\x07\x9b2J\r" + "\n" + r"\tb"),
        (False, evil),
    ):
        stream = io.StringIO()
        stream.isatty = lambda is_terminal=is_terminal: is_terminal
        Console(stream=stream).print_line(evil)
        monkeypatch.setattr(sys, "stdout", stream)
        print_field("status", evil)
        line = r"a\x1b]0;owned\x07\x9b2J\r\n\tb"
        assert stream.getvalue() == f"{expected}\nstatus         {line}\n"


def test_one_live_line_below_lines_that_stay(terminal, monkeypatch):
    """On a terminal, permanent lines are kept, and the live line is removed before the next output."""
    monkeypatch.setattr("mamba_fsdp.reporting.console.SECONDS_BETWEEN_UPDATES", 0.0)
    console = Console(stream=terminal.stream())
    console.show_progress("step 18")
    console.print_line("step 19")
    console.show_progress("step 20")
    console.show_progress("validation 3/16")
    console.print_line("step 20: validation loss 3.0")
    console.show_progress("and so on")
    lines = [drawings(line)[-1] for line in terminal.text().split("\r\n") if line.strip()]
    assert [line[:15] for line in lines] == ["step 19", "step 20: valida", "and so on"]


@pytest.mark.parametrize("columns", [100, 60, 12])
def test_the_live_line_fits(columns, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(columns))
    window = Terminal(columns)
    console = Console(stream=window.stream())
    console.show_progress(LONG)
    console.show_progress("too soon after it to be read")
    (live,) = drawings(window.text())
    window.close()
    assert live == LONG[: columns - 1].rstrip()


def test_a_terminal_that_can_only_print_gets_lines(terminal, monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    console = Console(stream=terminal.stream())
    console.show_progress(LONG)
    console.print_line(LONG)
    console.show_progress("validation 3/16")
    assert terminal.text().count("step") == 1 and "\r" not in terminal.text().replace("\r\n", "\n")


def test_a_process_whose_reader_has_gone_ends_as_it_would_have(project):
    code = """
import sys
from mamba_fsdp.reporting.console import ignore_output_errors
ignore_output_errors()
for turn in range(3):
    print('x', flush=True)
    sys.stdin.readline()
print('from a library', file=sys.stderr)
"""
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=project,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout.readline() == b"x\n"
    process.stdout.close()
    process.stdin.close()
    assert (process.wait(300), process.stderr.read()) == (0, b"from a library\n")


def test_results_are_json_that_every_program_reads(tmp_path):
    assert format_json({"loss": float("nan"), "model": tmp_path}) == (
        f'{{\n "loss": null,\n "model": "{tmp_path}"\n}}'
    )


def test_the_share_that_a_validation_read_is_told_in_words():
    assert describe_share(1) == "all data" and describe_share(0.12345) == "12.3% of the data"
