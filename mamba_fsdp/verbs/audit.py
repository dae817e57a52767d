"""python -m mamba_fsdp audit RUN

Prove that a run saw each window of its sources as often as its epochs say, over all its starts, whatever their numbers
of ranks, batch sizes and mixtures. A run with --sample_log=true has written which windows each step took and what its
ranks read (RUN/samples.jsonl); without, only the positions in the checkpoints can be held against each other.
Exits with 2, and names the first window, where one was left out or seen twice.
"""

from pathlib import Path

from mamba_fsdp.errors import UserError
from mamba_fsdp.report.console import say
from mamba_fsdp.run_layout import CHECKPOINTS, SAMPLES, committed


def main(run: str) -> None:
    from mamba_fsdp.checkpoint.folder import read_state
    from mamba_fsdp.data.sample_log import audit

    saved = {}
    for checkpoint in committed(Path(run) / CHECKPOINTS):
        try:
            progress = read_state(checkpoint)["state"]["progress"]
            saved[progress["step"]] = progress
        except UserError as error:  # a run that resumes passes it over too
            say("warning", f"left out: {error}")
    ledger = audit(Path(run) / SAMPLES, saved)
    if ledger.step < 0:
        raise UserError(f"{run}: holds neither checkpoints nor {SAMPLES}; is it a run folder?")
    starts = f", starts on {', '.join(map(str, ledger.starts))} ranks" if ledger.starts else ""
    say("run", f"{run}: {ledger.step:,} steps{starts}; positions of {len(saved)} checkpoints")
    for part in [*ledger.position["closed"], ledger.position]:
        closed = f" (closed: seed {part['seed']}, seq_length {part['seq_length']})" * (
            part is not ledger.position
        )
        for name, drawn in part["drawn"].items():
            windows = part["windows"].get(name)
            seen = f"{drawn:,} windows"
            if windows:  # older positions don't say it
                seen = f"{drawn // windows:,} epochs of {windows:,} windows, and {drawn % windows:,} of the next"
            say("source", f"{name}: {seen}{closed}")
    if ledger.logged:
        say(
            "proved",
            f"{ledger.logged:,} samples: each step read those windows that were next, none twice in an epoch",
        )
    if ledger.passed_over:
        say(
            "passed over",
            f"{ledger.passed_over:,} samples, skipped after loss spikes (events.jsonl)",
        )
    if ledger.inherited:
        say(
            "before",
            f"{ledger.inherited:,} windows more were drawn by the run whose position this one took over",
        )
    if ledger.unlogged:
        steps = ", ".join(f"{first:,} to {last:,}" for first, last in ledger.unlogged)
        say(
            "not proved",
            f"what steps {steps} read: they have no log (--sample_log=true). Positions only show that no "
            "source went back, and as many draws as samples",
        )
    if saved and ledger.step > max(saved):
        say(
            "to come",
            f"steps {max(saved) + 1:,} to {ledger.step:,} lie behind the newest checkpoint: a run that "
            "resumes from there takes them again",
        )
