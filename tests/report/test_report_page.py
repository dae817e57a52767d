"""python -m mamba_fsdp report: the numbers of a run's files, in a page that a browser draws."""

import json
import math
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, models

from mamba_fsdp.errors import UserError
from mamba_fsdp.report.curves import curve, name_runs, summarise_run
from mamba_fsdp.verbs import report
from tests.support.checkpoints import commit_empty

EVIL = "<script>document.title = 'owned'</script>"


REPORT = """{"step": %d, "tokens": %d, "loss": %s, "learning_rate": %f, "grad_norm": 0.5, "tokens_per_second": 100.0,
 "skipped_steps": 0, "delaying_rank": 1, "source_tokens": {"EVIL": %d}, "source_epochs": {"EVIL": %f}}"""
VALIDATION = """{"step": 20, "val_loss": 3.5, "val_perplexity": 33.1, "val_tokens": 9, "val_share": 1.0,
 "samples": ["EVIL", "one\\n  two"]}"""
CONFIG = "training: {seed: %d, kernels: auto}\ndata: {dataset_path: %s}\n"
EVENTS = """\
{"time": "2026-01-02T03:04:05Z", "event": "started", "step": 0, "ranks": 2, "from": "EVIL"}
{"time": "2026-01-02T03:04:05Z", "event": "started", "step": 20, "ranks": 2, "from": "EVIL"}
{"time": "2026-01-02T04:04:05Z", "event": "checkpoint", "step": 20, "bytes": 2500000, "seconds": 1.5}
"""


def write_run(folder, losses, seed=1):
    """A run of 10 steps a report, 640 tokens each, 100 tokens a second; validated half-way; killed in a line."""
    folder.mkdir(parents=True)
    lines = []
    for n, loss in enumerate(losses, 1):
        report = REPORT % (10 * n, 640 * n, json.dumps(loss), 0.1 / n, 640 * n, n / 8)
        lines.append(report.replace("\n", "").replace("EVIL", EVIL))
    lines.insert(2, VALIDATION.replace("\n", "").replace("EVIL", EVIL))
    (folder / "metrics.jsonl").write_text("\n".join([*lines, '{"step": 9']))
    (folder / "config.yaml").write_text(CONFIG % (seed, json.dumps(EVIL)))
    (folder / "status.json").write_text('{"status": "stopped", "step": 0}')
    (folder / "events.jsonl").write_text(EVENTS.replace("EVIL", EVIL))
    commit_empty(folder, 20)
    return folder


def test_a_run_is_read_while_it_is_written(tmp_path):
    run = summarise_run(write_run(tmp_path / "run", [4.0, None, 2.0]))
    curves = {metric: (curve["steps"], curve["mean"]) for metric, curve in run["curves"].items()}
    assert curves["loss"] == ([10, 20, 30], [4.0, None, 2.0]) and curves["val_loss"] == (
        [20],
        [3.5],
    )
    assert run["axes"] == {"step": [0, 10, 20, 30], "tokens": [0, 640, 1280, 1920]}
    read = {"training.seed": 1, "training.kernels": "auto", "data.dataset_path": EVIL}
    assert run["settings"] == read
    assert (
        run["checkpoints"] == [20]
        and run["last"]["step"] == 30
        and run["last"][f"source_epochs/{EVIL}"] == 3 / 8
    )
    assert not {"step", "tokens", "val_share", "delaying_rank"} & curves.keys()


def test_a_long_curve_keeps_its_spikes_beside_its_means():
    values = np.linspace(5, 2, 100_000)
    values[31_415], values[50] = 50.0, math.nan
    found = curve(range(1, 100_001), values)
    assert {len(column) for column in found.values()} == {500}
    assert found["steps"][0] == 200 and found["steps"][-1] == 100_000
    at = found["high"].index(50.0)
    assert found["steps"][at - 1] < 31_416 <= found["steps"][at]
    assert found["mean"][at] == pytest.approx(np.mean(values[200 * at : 200 * at + 200]))
    assert found["low"][0] == values[199] and found["mean"][0] == pytest.approx(
        np.nanmean(values[:200])
    )
    lost = curve(range(2000), [math.nan] * 2000)
    assert lost["mean"] == lost["high"] == [None] * 500


@pytest.mark.parametrize(
    "paths, names",
    [
        (["x/a/train", "x/b/train"], ["a/train", "b/train"]),
        (["x/run"], ["run"]),
        (["x/one", "x/two/deep"], ["one", "two/deep"]),
        (["x", "x/y"], ["x", "x/y"]),
    ],
)
def test_runs_are_named_by_what_differs(tmp_path, paths, names):
    assert name_runs([tmp_path / path for path in paths]) == names


def test_what_is_no_run_or_has_nothing_yet_is_one_line(tmp_path):
    with pytest.raises(UserError, match="nowhere: there is no such folder"):
        report.main(str(tmp_path / "nowhere"), options=report.Options())
    (tmp_path / "metrics.jsonl").touch()
    with pytest.raises(UserError, match="nothing is recorded yet"):
        report.main(str(tmp_path), options=report.Options())
    run = write_run(tmp_path / "run", [1.0])
    with pytest.raises(UserError, match="config.yaml.*can't be written"):
        report.main(str(run), options=report.Options(str(run / "config.yaml/report.html")))
    with pytest.raises(UserError, match="/proc/x.html: can't be written"):
        report.main(str(run), options=report.Options("/proc/x.html"))
    (run / "metrics.jsonl").unlink()
    (run / "metrics.jsonl").mkdir()
    with pytest.raises(UserError, match=r"metrics.jsonl: can't be read \(Is a directory\)$"):
        report.main(str(run), options=report.Options())


def test_losses_of_different_tokenizers_are_compared_per_byte(tmp_path):
    runs = [write_run(tmp_path / name, [2.0]) for name in "ab"]
    for run in runs:
        with open(run / "metrics.jsonl", "a") as file:
            file.write('\n{"step": 10, "val_loss": 3, "val_bits_per_byte": 1.5}\n')
    for letter, names in (
        ("x", ["Loss", "Perplexity", "Bits per byte"]),
        ("y", ["Bits per byte", "Loss"]),
    ):
        for run, words in zip(runs, ("x", letter)):
            (run / "tokenizer").mkdir(exist_ok=True)
            words = Tokenizer(models.WordLevel({words: 0}, unk_token=words))
            words.save(str(run / "tokenizer/tokenizer.json"))
        page = tmp_path / "report.html"
        report.main(*map(str, runs), options=report.Options(str(page)))
        charts = re.findall('"title": "(.*?)", "unit": "(.*?)"', page.read_text())
        assert [title for title, _ in charts][: len(names)] == names
        assert (letter == "y") == any("not comparable" in unit for _, unit in charts)


@pytest.mark.slow
def test_a_browser_draws_the_page_without_a_network(tmp_path, browse):
    long = EVIL.replace("/", "|") + "n" * 150
    runs = [
        write_run(tmp_path / "a" / long, [4.0, None, 3.0, 2.0], seed=1),
        write_run(tmp_path / "b/train", [5.0, *np.linspace(3.5, 3, 1400), 80.0], seed=2),
    ]
    report.main(*map(str, runs), options=report.Options(str(tmp_path)))
    found = browse(tmp_path / "report.html", (Path(__file__).parent / "try_page.js").read_text())
    names = [f"a/{long}", "b/train"]
    assert found["errors"] == found["network"] == [] and found["title"] == "Training report: 2 runs"
    assert found["charts"] == [
        "Loss, nats per token",
        "Perplexity",
        "Learning rate",
        "Gradient norm",
        "Throughput, tokens/s",
    ]
    assert all(found["drawn"]) and found["wide"] <= 0 and not found["over"]
    assert found["steps"][0] == [names[0], "loss", [10, 20, 30, 40], [4.0, None, 3.0, 2.0]]
    assert found["steps"][1] == [names[0], "val_loss", [20], [3.5]] and found["text"] == [
        "4",
        "",
        "3",
        "2",
    ]
    assert max(found["steps"][3][3]) == pytest.approx((80 + 2 * 3) / 3, rel=1e-3)  # a bucket's mean
    assert found["range"][1] < 6 and found["note"] == "up to 80; a double click shows all"
    assert found["restarts"] == [20, 20]
    runs_, samples, differing, mixture, events, checkpoints = found["tables"]
    assert re.search(rf"\s20\s+{re.escape(EVIL)}\s+one\n  two", samples)
    assert names[0] in runs_ and re.search(
        r"stopped\s+40\s+2,560\s+2\s+3\.5\s+33\.1\s+100\s+1\b", runs_
    )
    assert re.search(r"training\.seed\s+1\s+2", differing) and "kernels" not in differing
    assert re.search(re.escape(EVIL) + r"\s+2,560\s+100\.0 %\s+0\.5", mixture)
    assert f"2026-01-02 03:04:05\tstarted\t20\tranks: 2, from: {EVIL}" in events
    assert re.search(r"20\s+1\s+2\.5 MB\s+1\.5$", checkpoints)
    assert found["tokens"] == [640, 1280, 1920, 2560]
    assert found["log"] == "log" and found["left"] == names[1:]
    assert found["smooth"] == [
        4.0,
        None,
        pytest.approx((0.25 * 4 + 0.5 * 3) / 0.75),
        pytest.approx((0.125 * 4 + 0.25 * 3 + 0.5 * 2) / 0.875),
    ]
    assert found["theme"] in ("rgb(18, 22, 28)", "rgb(246, 247, 249)")


HEADLESS = """--headless --no-sandbox --disable-gpu --disable-dev-shm-usage --dump-dom --window-size=500,900
--virtual-time-budget=20000"""


@pytest.fixture
def browse(tmp_path):
    """browse(page, script) -> what the script, which runs in the page, leaves between FOUND and END."""
    browser = next(
        filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
    )
    if not browser:
        pytest.skip("there is no browser: apt-get install chromium")

    def run(page, script):
        tried = tmp_path / "tried.html"
        tried.write_text(
            page.read_text().replace("<title>", f"<script>{script}</script><title>", 1)
        )
        for attempt in range(3):  # a browser may fail to start
            done = subprocess.run(
                [
                    browser,
                    *HEADLESS.split(),
                    f"--user-data-dir={tmp_path / f'profile{attempt}'}",
                    f"file://{tried}",
                ],
                capture_output=True,
                text=True,
                timeout=280,
            )
            if told := re.search("<pre>FOUND(.*)END</pre>", done.stdout, re.DOTALL):
                break
        assert told, (done.stdout[-500:], done.stderr[-500:])
        return json.loads(told[1].replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&"))

    return run
