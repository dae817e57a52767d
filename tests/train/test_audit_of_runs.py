"""Runs that are killed and resume on other ranks, with other batches, mixtures and window lengths: audit proves that
all was read once, metrics tell of each source, and forged logs are refused."""

import json
import subprocess
import sys
import time

import pytest

from config import resolve
from mamba_fsdp import command_line
from mamba_fsdp.train.run import run_training
from mamba_fsdp.verbs import audit as verb
from tests.support.forked import said_by, start_ranks

MIXED = {"datasets": "train,other", "sample_log": True, "eval_interval": 0, "schedule": "constant"}


@pytest.fixture
def audit(capsys):
    """audit(run) -> (exit code, what it said)."""

    def call(run):
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            command_line.run(verb.main, lambda: "", [str(run)])
        return ended.value.code, "".join(capsys.readouterr())

    return call


def lines_of(run):
    return [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]


@pytest.mark.slow
@pytest.mark.torch22
def test_killed_and_changed_runs_read_each_window_once(
    start_training, tiny_file, corpus, tmp_path, audit
):
    run = tmp_path / "run"
    process = start_training(run, **MIXED, num_steps=10**6, checkpoint_interval=7)
    while len(list(run.glob("checkpoints/step_*"))) < 3:
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    process.kill()
    process.communicate()
    killed = int(sorted(run.glob("checkpoints/step_*"))[-1].name[5:])
    assert killed % 7 == 0 and audit(run)[0] == 0  # also before anything resumes
    starts = (
        (2, 10, {"datasets": "train", "batch_size": 1, "global_batch_size": 6}),
        (1, 20, {"weights": "1,3", "seq_length": 16, "new_epoch": True}),
    )
    for ranks, more, given in starts:
        words = {
            "config": tiny_file,
            **MIXED,
            "dataset_path": corpus,
            "save_ckpt_path": run,
            "num_steps": killed + more,
            **given,
        }
        said = said_by(start_ranks(ranks, [f"--{name}={value}" for name, value in words.items()]))
        assert ("seq_length 32 is closed" in said) == (more == 20)
    code, said = audit(run)
    assert code == 0 and f"{killed + 20} steps, starts on 1, 2, 1 ranks" in said, said
    steps = [line for line in lines_of(run) if "draws" in line]
    assert [line["step"] for line in steps] == list(
        range(1, killed + 21)
    )  # none that was lost, none twice
    drawn = {}
    for line in steps[killed + 10 :]:
        for name, (first, end) in line["draws"].items():
            assert first == drawn.get(name, 0)
            drawn[name] = end
    last = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    assert sum(last["source_tokens"].values()) == last["tokens"]
    assert last["source_epochs"].keys() == {"train", "other"}
    place = killed + 15
    for change in (
        lambda line: line["draws"].update(other=[draw + 1 for draw in line["draws"]["other"]]),
        lambda line: line.update(read="0" * 16),
    ):
        lines = lines_of(run)
        change(next(line for line in lines if line["step"] == place and "draws" in line))
        forged = tmp_path / "forged"
        subprocess.run(["cp", "-r", run, forged], check=True)
        (forged / "samples.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        code, said = audit(forged)
        assert (
            code == 2 and f"step {place}" in said and "window" in said and "Traceback" not in said
        ), said
        subprocess.run(["rm", "-r", forged], check=True)


@pytest.mark.slow
def test_a_changed_mixture_resumes_each_source_where_it_was(train, tmp_path, metrics_of):
    """New sources start at 0, a removed one is remembered and goes on when it is back; weights follow token counts."""
    run, at = tmp_path / "run", {}
    for steps, names in ((40, "train,other"), (44, "other"), (48, "train,other")):
        train(run, **{**MIXED, "datasets": names, "num_steps": steps, "checkpoint_interval": 50})
        at[steps] = metrics_of(run)[-1]["source_tokens"]
    assert at[40]["train"] / at[40]["other"] == pytest.approx(12675 / 2782, rel=0.1)
    assert at[44] == {**at[40], "other": at[40]["other"] + 4 * 64}
    assert at[48]["train"] > at[44]["train"] and sum(at[48].values()) == 48 * 64
    (run / "samples.jsonl").unlink()
    train(run, **{**MIXED, "num_steps": 50, "sample_log": False})
    assert not (run / "samples.jsonl").exists()  # nobody asked for it


@pytest.mark.slow
def test_what_no_log_tells_is_said(train, project, tmp_path, audit):
    run = tmp_path / "run"
    for steps, logged in ((2, False), (4, True), (6, False)):
        train(run, **{**MIXED, "num_steps": steps, "sample_log": logged})
    code, said = audit(run)
    assert (
        code == 0 and "proved         4 samples" in said and "steps 1 to 2, 5 to 6 read" in said
    ), said
    done = subprocess.run(
        [sys.executable, "-m", "mamba_fsdp", "audit", str(tmp_path)],
        cwd=project,
        text=True,
        capture_output=True,
    )
    assert done.returncode == 2
    assert done.stderr.startswith(
        f"error: {tmp_path}: holds neither checkpoints nor samples.jsonl"
    ), done.stderr


@pytest.mark.slow
def test_the_mixture_of_mambaoutai_trains_and_is_audited(make_store, tmp_path, monkeypatch, audit):
    """The ready run with its 14 sources, but for the size of model, batch and data."""
    monkeypatch.chdir(tmp_path)
    shares = dict(
        zip(
            *(
                getattr(resolve.resolve_settings({}, "mambaoutai")[0].data, field)
                for field in ("datasets", "weights")
            )
        )
    )
    for number, name in enumerate(shares):
        make_store(tmp_path / "data" / "mambaoutai" / name / "train", number, 12)
    small = {
        "d_model": 16,
        "n_layer": 1,
        "vocab_size": 64,
        "seq_length": 32,
        "batch_size": 10,
        "global_batch_size": 20,
        "num_steps": 50,
        "sharding_strategy": "none",
        "report_interval": 50,
        "checkpoint_interval": 50,
        "sample_log": True,
        "validation_path": "none",
    }
    words = {name: str(value) for name, value in small.items()}
    run_training(resolve.resolve_settings(words, "mambaoutai")[0])
    last = json.loads((tmp_path / "runs/mambaoutai/metrics.jsonl").read_text().splitlines()[-1])
    tokens = last["source_tokens"]
    assert tokens.keys() == shares.keys() and sum(tokens.values()) == 50 * 20 * 32
    for name, share in shares.items():
        assert tokens[name] / sum(tokens.values()) == pytest.approx(share, abs=0.002)
    code, said = audit(tmp_path / "runs/mambaoutai")
    assert code == 0 and "proved         1,000 samples" in said, said
