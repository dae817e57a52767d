"""python -m mamba_fsdp preflight report FOLDER SETTINGS
python -m mamba_fsdp preflight judge FOLDER NODE ...
python -m mamba_fsdp preflight kernels RUN SETTINGS

Check whether the nodes of a job are fit for this training. 1.train.sbatch runs
`report` on every node, in the training's own environment. Then it runs `judge`
once: it prints the hardware and the problems of each NODE, and writes
verdict.json. FOLDER is a new folder in the run folder RUN, and SETTINGS is the
file with the settings of this start. `kernels` tests the run's kernels on each
GPU of this node. Exit codes of judge: 0 all nodes are fit; 1 the problem can be
transient or on a single node only; 2 you have to fix it.
"""

import json
import os
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

from mamba_fsdp.errors import PROJECT, StorageError, UserError
from mamba_fsdp.interop.places import find_origin
from mamba_fsdp.launch import machine
from mamba_fsdp.launch.checks import CHECKS
from mamba_fsdp.launch.plan import check_inputs, check_space
from mamba_fsdp.run.names import VERDICT
from mamba_fsdp.settings.resolve import read_resolved
from mamba_fsdp.settings.train_config import TrainConfig
from mamba_fsdp.storage.retry import exists, is_file, read_bytes
from mamba_fsdp.storage.typed_json import write_object
from mamba_fsdp.trainer.fingerprint import code_digest

JOB_CHECKS = [check for check in CHECKS if check.exit_code is not None]


def main(action: str, folder: str, *args: str) -> int:
    if action == "judge" and args:
        return judge(Path(folder), args)
    if action == "kernels" and len(args) == 1:
        return test_kernels(Path(folder), Path(args[0]))
    if action != "report" or len(args) != 1:
        raise UserError(
            "preflight: write `report FOLDER SETTINGS`, `judge FOLDER NODE ...` or `kernels RUN SETTINGS`"
        )
    report(Path(folder), Path(args[0]))
    return 0


def report(folder: Path, settings_file: Path) -> None:
    """Runs the checks on this node and writes the results into `folder`.

    settings_file: the settings of this start, written by the first node. Raises UserError if the folder is not shared
    between the nodes or not writable.
    """
    node = machine.node_name()
    if not is_file(settings_file):
        raise UserError(
            f"{node}: {folder} is not the folder that the first node sees; mount the shared file system on "
            f"{node}, or set save_ckpt_path to a folder on it"
        )
    settings = read_resolved(settings_file)
    content = {
        "code": code_digest(),
        "mistake": find_mistake(settings),
        "ranks": machine.processes_per_node(),
        "findings": {check.name: asdict(check.run()) for check in JOB_CHECKS},
    }
    try:
        write_object(folder / f"{node}.json", content)
    except OSError as error:
        raise UserError(
            f"{node}: can't write {folder} ({error.strerror}); let uid {os.getuid()} write there"
        ) from None


def find_mistake(settings: TrainConfig) -> str:
    """Returns the first error that a start would raise on this node, or "".

    Checks the weights (missing, or of another model), the data (missing; the first node also checks the content), and the
    free space for checkpoints. Raises StorageError for a transient error of the storage; `judge` then finds no report from
    this node."""
    try:
        if settings.checkpoint.starts_from_model():
            from mamba_fsdp.trainer.starting_point import adopt_weights

            settings, _ = adopt_weights(settings, find_origin(settings.checkpoint))
        path = os.path.abspath(settings.data.dataset_path)
        if not settings.data.use_dummy_dataset and not exists(path):
            raise UserError(
                f"there is no {path}; mount the shared file system there, correct the setting, or make it with "
                "get_dataset.py (with an image: sbatch 2.tokenize.sbatch INPUT OUT)"
            )
        if machine.is_first_node():  # the content is the same on all nodes
            check_inputs(settings)
        # A run needs space for one checkpoint more than it keeps, because it removes the oldest one only after it has
        # committed the newest one.
        check_space(settings, settings.checkpoint.keep_checkpoints + 1)
    except StorageError:
        raise
    except UserError as error:
        return str(error)
    return ""


def test_kernels(run: Path, settings_file: Path) -> int:
    """Tests the kernels that the run has chosen, on each GPU of this node, and returns 0. Raises UserError if a kernel is
    wrong. Tests nothing without a GPU, or if the run has not chosen its kernels yet.

    run: the run folder. settings_file: see `report`."""
    if not machine.count_assigned_gpus():
        return 0
    from mamba_fsdp.trainer.kernel_selection import test_node_kernels

    tested = test_node_kernels(read_resolved(settings_file), run)
    print(f"{machine.node_name()}: {tested}")
    return 0


class Problem(NamedTuple):
    exit_code: int  # 2: the user has to fix it; 1: the next start can succeed; 0: a warning
    node: str
    sentence: str


def judge(folder: Path, nodes: Sequence[str]) -> int:
    """Prints a line for each node and each problem, and writes the verdict.

    folder: the folder with the nodes' reports. nodes: host names. Returns the exit code: the highest of all problems, or 0."""
    reports = {}
    problems = []
    own_code = code_digest()
    for node in nodes:
        path = folder / f"{node}.json"
        content = json.loads(read_bytes(path)) if is_file(path) else None
        if content is None:
            sentence = (
                "the first node can't read a report of this node; look at its lines above. If there are none, the "
                f"node is down: scontrol show node {node}, and submit again with --exclude={node}"
            )
            problems.append(Problem(1, node, sentence))
        elif content.get("code") != own_code:  # None: an older version wrote the report
            sentence = (
                f"its {PROJECT} contains other code than on {nodes[0]}; mount the shared file system there, "
                f"or submit again with --exclude={node}"
            )
            problems.append(Problem(1, node, sentence))
        else:
            reports[node] = content
    for index, (node, content) in enumerate(reports.items()):
        findings = content["findings"]
        print(f"node {index}     {node}: {findings['GPUs']['text']}, {findings['EFA']['text']}")
    problems += [
        Problem(2, node, content["mistake"])
        for node, content in reports.items()
        if content["mistake"]
    ]
    problems += problems_of_checks(reports)
    for code, node, sentence in problems:
        print(f"{'error' if code else 'warning'}: {node}: {sentence}", file=sys.stderr)
    verdict = {
        "unfit": {problem.node: problem.sentence for problem in problems if problem.exit_code == 1},
        "ranks_per_node": max((content["ranks"] for content in reports.values()), default=1),
    }
    write_object(folder / VERDICT, verdict)
    return max((problem.exit_code for problem in problems), default=0)


def problems_of_checks(reports: dict[str, dict]) -> list[Problem]:
    """Returns a problem for each check that fails on a node, or that has another finding on a node than on most nodes."""
    problems = []
    for check in JOB_CHECKS:
        texts: dict[str, str] = {}  # {node on which the check succeeds: its finding}
        for node, content in reports.items():
            finding = content["findings"][check.name]
            text = finding["text"]
            if finding["verdict"] == "FAIL":
                problems.append(Problem(check.exit_code or 0, node, text))
            else:
                texts[node] = text
        if not check.if_nodes_differ or not texts:
            continue
        expected, _ = Counter(texts.values()).most_common(1)[0]
        usual = next(node for node, text in texts.items() if text == expected)
        for node, text in texts.items():
            if text != expected:
                remedy = check.if_nodes_differ.format(node=node)
                sentence = f"it has {text}, but {usual} has {expected}; {remedy}"
                problems.append(Problem(1, node, sentence))
    return problems
