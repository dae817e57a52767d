"""Tests `python -m mamba_fsdp report`: the data in its page, and the curves that plotly draws from it."""

import json
import re
import sys
from pathlib import Path

import numpy as np
import plotly.graph_objects
import pytest
from tokenizers import Tokenizer, models

from mamba_fsdp.errors import UserError
from mamba_fsdp.reporting.run_summary import name_runs
from mamba_fsdp.verbs import report
from tests.support.checkpoints import commit_empty

EVIL = "</script><script>document.title = 'owned'</script>"


REPORT = """{"step": %d, "tokens": %d, "loss": %s, "learning_rate": %f, "grad_norm": 0.5, "tokens_per_second": 100.0,
 "skipped_steps": 0, "delaying_rank": 1, "source_tokens": {"EVIL": %d}, "source_epochs": {"EVIL": %f}}"""
VALIDATION = """{"step": 20, "val_loss": 3.5, "val_perplexity": 33.1, "val_tokens": 9, "val_share": 1.0,
 "val_source_loss": {"x": 1.0, "y": 2.0}, "samples": ["EVIL", "one\\n  two"]}"""
CONFIG = "version: 3\ntraining: {seed: %d, kernels: auto}\ndata: {dataset_path: %s, datasets: [a, b], deep: [[1]]}\n"
EVENTS = """\
{"time": "2026-01-02T03:04:05Z", "event": "started", "step": 0, "from": "EVIL", "validation": {"x": "1", "y": "1"}}
{"time": "2026-01-02T03:04:05Z", "event": "started", "step": 20, "torch": "2", "changed": "a 1 -> 2", "from": "EVIL",
 "validation": {"x": "2", "y": "1"}, "weights": {"x": 0.5, "y": 2}}
{"time": "2026-01-02T04:04:05Z", "event": "checkpoint", "step": 20, "bytes": 2500000, "seconds": 1.5}
{"time": "2026-01-02T03:04:05Z", "event": "started", "step": 40, "from": null, "validation": {"x": "2", "y": "1"}}
"""


def write_run(folder, losses, seed=1):
    """Writes a run with a report every 10 steps or 640 tokens.

    The run was validated once, and killed while it wrote a line.
    """
    folder.mkdir(parents=True)
    lines = []
    for n, loss in enumerate(losses, 1):
        report = REPORT % (10 * n, 640 * n, json.dumps(loss), 0.1 / n, 640 * n, n / 8)
        lines.append(report.replace("\n", "").replace("EVIL", EVIL))
    lines.insert(2, VALIDATION.replace("\n", "").replace("EVIL", EVIL))
    (folder / "metrics.jsonl").write_text("\n".join([*lines, '{"step": 9']))
    (folder / "config.yaml").write_text(CONFIG % (seed, json.dumps(EVIL)))
    (folder / "status.json").write_text('{"status": "stopped", "step": 0}')
    (folder / "events.jsonl").write_text(EVENTS.replace(",\n", ",").replace("EVIL", EVIL))
    commit_empty(folder, 20)
    return folder


def append(file, entry):
    with open(file, "a") as lines:
        lines.write("\n" + json.dumps(entry) + "\n")


def page_of(*runs, out):
    report.main(*map(str, runs), options=report.Options(str(out)))
    return out.read_text()


def content_of(page):
    """Returns the data of the page: {made, runs, differing, figure}."""
    return json.loads(re.search(r"^const \{.*\} = (\{.*\});$", page, re.MULTILINE)[1])


def test_the_data_of_a_page_changes_only_on_purpose(tmp_path, golden):
    """The data of a page equals page.yaml. The page shows three runs: one that was restarted twice, with other
    validation data, and still trains; one with another seed; and one that has just started."""
    runs = [write_run(tmp_path / f"run{seed}", [4.0, None, 2.0, 1.0], seed) for seed in (1, 2)]
    append(runs[0] / "metrics.jsonl", {"step": 40, "val_loss": 5.0, "val_source_loss": {"y": 3.0}})
    (runs[0] / "evaluations").mkdir()
    for name, step in (("b", 2), ("a", 1)):
        append(
            runs[0] / f"evaluations/{name}.jsonl",
            {"step": step, "evaluated": {"t/acc": 0.5 * step}},
        )
    begun = tmp_path / "begun"
    begun.mkdir()
    append(begun / "metrics.jsonl", {"step": 1, "loss": 9.0})
    (begun / "config.yaml").write_text(CONFIG % (1, json.dumps(EVIL)))
    content = content_of(page_of(*runs, begun, out=tmp_path / "page.html"))
    assert content.pop("made").startswith("20")
    golden.check_yaml("page.yaml", content)


def test_plotly_knows_every_part_of_the_figure(tmp_path):
    runs = [write_run(tmp_path / name, [*np.linspace(4, 2, 1500)]) for name in "ab"]
    figure = content_of(page_of(*runs, out=tmp_path / "page.html"))["figure"]
    plotly.graph_objects.Figure(figure)  # raises ValueError for an invalid figure
    axes = [part for name, part in figure["layout"].items() if name.startswith(("xaxis", "yaxis"))]
    # plotly.js can't draw an axis again if one of its values is None.
    assert axes and not any(None in axis.values() for axis in axes)


def test_what_files_say_ends_no_script_of_the_page(tmp_path):
    name = EVIL.replace("/", "|")
    run = write_run(tmp_path / name, [4.0])
    page = page_of(run, out=tmp_path / "page.html")
    assert content_of(page)["runs"][0]["name"] == name
    assert not re.search(r"<[^>]*owned", page) and "<img" not in page.split("const { made")[1]
    assert page.count("</script>") == 2 and not re.search("(src|href)=", page.split("<script>")[0])


def test_a_long_curve_keeps_its_spikes_beside_its_means(tmp_path):
    losses = np.linspace(5, 2, 9_616)
    losses[3_141] = 50.0
    losses = [None if step == 5 else loss for step, loss in enumerate(losses)]
    figure = content_of(page_of(write_run(tmp_path / "run", losses), out=tmp_path / "p.html"))[
        "figure"
    ]
    band, means = [trace for trace in figure["data"] if trace["yaxis"] == "y"][:2]
    size = 17  # 9,616 values are reduced to at most 600 points
    assert len(means["y"]) == 566 and band["fill"] == "toself" and len(band["y"]) == 2 * 566
    assert means["meta"]["steps"][0] == 10 * size and means["meta"]["steps"][-1] == 96_160
    at = band["y"].index(50.0)
    assert band["meta"]["steps"][at] == means["meta"]["steps"][3_141 // size]
    known = [loss for loss in losses[:size] if loss is not None]
    assert means["y"][0] == pytest.approx(np.mean(known))
    assert means["y"][-1] == pytest.approx(np.mean(losses[565 * size :]))
    # The spike is outside the initial view.
    assert figure["layout"]["yaxis"]["range"] == pytest.approx([1.8536, 5.1464], abs=1e-4)


def test_numbers_that_are_not_finite_are_gaps(tmp_path):
    """A loss that is not finite is a gap in the curve, also if the curve is reduced to fewer points.

    A speed of 0 counts as no time, because the hours would otherwise be infinite.
    """
    run = write_run(tmp_path / "run", [None] * 1500)
    lines = (run / "metrics.jsonl").read_text()
    (run / "metrics.jsonl").write_text(lines.replace("100.0", "0.0", 1))
    (run / "config.yaml").write_text("{")
    content = content_of(page_of(run, out=tmp_path / "page.html"))
    assert content["runs"][0]["settings"] == {}
    losses = content["figure"]["data"][2]
    assert set(losses["y"]) == {None}
    hours = losses["meta"]["hours"]
    assert hours[-1] == pytest.approx(1499 * 6.4 / 3600, rel=2e-3)


def test_without_plotly_a_line_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    with pytest.raises(UserError, match="pip install plotly"):
        page_of(write_run(tmp_path / "run", [4.0]), out=tmp_path / "page.html")


def test_runs_are_named_by_what_differs():
    for paths, names in (
        (["x/a/train", "x/b/train"], ["a/train", "b/train"]),
        (["x/one", "x/two/deep"], ["one", "two/deep"]),
        (["x", "x/y"], ["x", "x/y"]),
    ):
        assert name_runs([*map(Path, paths)]) == names


def test_records_that_cannot_be_read_are_one_line(tmp_path):
    (tmp_path / "metrics.jsonl").mkdir()
    with pytest.raises(
        UserError, match=r"metrics.jsonl: can't be read \(Is a directory\); check that it is a file"
    ):
        report.main(str(tmp_path), options=report.Options())


def test_losses_of_different_tokenizers_are_compared_per_byte(tmp_path):
    runs = [write_run(tmp_path / name, [2.0]) for name in "ab"]
    for run in runs:
        append(run / "metrics.jsonl", {"step": 10, "val_loss": 3, "val_bits_per_byte": 1.5})
    for letter, first, loss in (
        ("x", "loss", "loss"),
        ("y", "bits per byte", "loss  per token of different tokenizers: not comparable"),
    ):
        for run, words in zip(runs, ("x", letter)):
            (run / "tokenizer").mkdir(exist_ok=True)
            words = Tokenizer(models.WordLevel({words: 0}, unk_token=words))
            words.save(str(run / "tokenizer/tokenizer.json"))
        layout = content_of(page_of(*runs, out=tmp_path / "page.html"))["figure"]["layout"]
        titles = [re.sub("<.*?>", "", title["text"]) for title in layout["annotations"]]
        assert titles[0] == first and loss in titles


def test_a_run_that_stopped_between_two_reports_has_its_last_step(tmp_path):
    """The page shows the step at which a run has stopped, even if there is no report of this step.

    A metric that equals another one, such as the speed of a single device, is drawn once.
    """
    run = write_run(tmp_path / "run", [4.0, 3.0])
    (run / "metrics.jsonl").write_text(
        '{"step": 20, "loss": 2.0, "tokens_per_second": 7.0, "tokens_per_second_per_device": 7.0}\n'
    )
    append(run / "events.jsonl", {"step": 44, "event": "stopped"})
    report.main(str(run), options=report.Options(str(tmp_path / "new")))
    content = content_of((tmp_path / "new/report.html").read_text())
    assert content["runs"][0]["last"]["step"] == 44
    titles = str(content["figure"]["layout"]["annotations"])
    assert titles.count("tokens per second") == 1
