"""benchmarks.gpu --all: one part that hangs or fails takes no other along, and every part runs through on a CPU."""

import json
import os
import subprocess
import sys
import time

import pytest

from benchmarks.gpu import all as everything


def fine(keep, **_):
    keep([{"a": 1}, {"a": 2, "b": "x|y"}])


def broken(**_):
    raise ValueError("the reason")


def gone(**_):
    os._exit(7)


def hangs(keep, scratch, **_):
    keep([{"so far": "this"}])
    child = subprocess.Popen(["sleep", "1000"])
    (scratch.parent / f"child-{os.getppid()}").write_text(str(child.pid))
    time.sleep(1000)


@pytest.mark.slow
def test_each_part_has_its_own_end(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    parts = [
        ("hangs-1.4b", 6, hangs),
        ("broken", 60, broken),
        ("gone", 60, gone),
        ("fine", 60, fine),
    ]
    assert everything.main(["--rehearse", f"--out={tmp_path / 'out'}"], parts) == 1
    said = capsys.readouterr().out.splitlines()
    assert [line.split(" s  ")[1] for line in said] == [
        "stopped after 6 s",
        "ValueError: the reason",
        "ended with 7",
        "done",
    ]
    assert json.loads((tmp_path / "out/03-fine.json").read_text()) == [
        {"a": 1},
        {"a": 2, "b": "x|y"},
    ]
    assert (tmp_path / "out/03-fine.md").read_text().splitlines() == [
        "| a | b |",
        "| --- | --- |",
        "| 1 |  |",
        "| 2 | x/y |",
    ]
    assert "this" in (tmp_path / "out/00-hangs-1.4b.md").read_text(), "what it had by then stays"
    assert "Traceback" in (tmp_path / "out/01-broken.log").read_text()
    summary = (tmp_path / "out/summary.md").read_text()
    assert all(word in summary for word in ("| gone | ", "ended with 7", "## 03-fine", "so far"))
    child = int((tmp_path / f"child-{os.getpid()}").read_text())
    time.sleep(0.2)
    with pytest.raises(
        OSError
    ):  # what the part had started has ended with it (a zombie has no command line)
        if not open(f"/proc/{child}/cmdline").read():
            raise OSError


def test_no_part_begins_when_the_time_is_over(tmp_path, capsys):
    assert (
        everything.main(["--rehearse", f"--out={tmp_path}", "--minutes=0.05"], [("fine", 60, fine)])
        == 1
    )
    assert "no time was left" in capsys.readouterr().out


def test_without_cuda_it_says_so(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("torch.version.cuda", None)
    assert everything.main([f"--out={tmp_path / 'out'}"]) == 2 and not (tmp_path / "out").exists()
    assert capsys.readouterr().err.startswith("error: benchmarks.gpu needs a CUDA device")


@pytest.mark.slow
@pytest.mark.parametrize(
    "names", ["machine,operators,trace-mamba-1.4b,checkpoint,step-mamba2-1.3b", "repeat,starts"]
)
def test_it_is_rehearsed_on_a_cpu(tmp_path, names, project):
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "benchmarks.gpu",
            "--all",
            "--rehearse",
            f"--only={names}",
            "--out",
            tmp_path,
        ],
        cwd=project,
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    tables = {path.name[3:-5]: json.loads(path.read_text()) for path in tmp_path.glob("*.json")}
    assert sorted(tables) == sorted(names.split(",")) and all(tables.values())
    notes = [row["note"] for table in tables.values() for row in table if row.get("note")]
    assert all("GPU" in note or "does not load" in note for note in notes), notes
    for row in tables.get("operators", []):
        assert float(row["error float32"]) < 1e-5 and row["same bits"] == "yes"
    for row in tables.get("repeat", []):
        assert row["equal runs"] == row["killed, resumed"] == "same bits"
