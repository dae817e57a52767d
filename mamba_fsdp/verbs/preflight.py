"""python -m mamba_fsdp preflight report FOLDER [settings of the training command]
python -m mamba_fsdp preflight judge FOLDER NODE ...

Are the nodes of a job fit for this training? 1.train.sbatch runs `report` on every node, in the training's own
environment, then `judge` once, which prints what each NODE is and what is wrong with it. FOLDER is a fresh folder in
the run folder with a file `token`. Exit codes of judge: 0, 2 for what you have to mend, 1 for trouble that may pass.
"""

import json
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from config.resolve import resolve_settings
from config.train_config import TrainConfig
from mamba_fsdp.errors import StorageError, UserError
from mamba_fsdp.launch.machine import (
    PROJECT,
    assigned_gpus,
    check_version,
    driver_gpus,
    efa_plugin,
    node_name,
)
from mamba_fsdp.launch.plan import run_folder
from mamba_fsdp.model.spec import parameter_count
from mamba_fsdp.planning.estimate import CHECKPOINT_BYTES
from mamba_fsdp.run_layout import CHECKPOINTS, committed
from mamba_fsdp.storage import write_atomically


def main(action: str, folder: str, *words: str, **given: Any) -> int:
    if action == "judge" and words and not given:
        return judge(Path(folder), words)
    if action != "report":
        raise UserError("preflight: write `report FOLDER SETTINGS` or `judge FOLDER NODE ...`")
    settings, explicit = resolve_settings(given, given.pop("config", None), words)
    mistakes = []  # a hang or a crash an hour later would say much less
    if settings.checkpoint.init_from or settings.checkpoint.load_ckpt_path:
        from mamba_fsdp.verbs.loading import starting_weights

        try:
            starting_weights(settings, explicit)  # whose shape the model has
        except StorageError:
            raise  # trouble that may pass: no answer, for the judge
        except UserError as error:
            mistakes.append(str(error))
    report(Path(folder), settings, mistakes)
    return 0


def report(folder: Path, settings: TrainConfig, mistakes: Sequence[str] = ()) -> None:
    """Write this node's findings for the TrainConfig `settings` into `folder`, where the first node has put `token`.

    mistakes: sentences on the weights to start from. Raises UserError where the folder is not shared or not writable.
    """
    node = node_name()
    if not (folder / "token").is_file():
        raise UserError(
            f"{node}: {folder} is not the folder that the first node sees; mount the shared file system on "
            f"{node}, or set save_ckpt_path to a folder on it"
        )
    shared = [PROJECT / "training.py", Path(os.path.abspath(settings.data.dataset_path))]
    wrong = [*mistakes]
    try:
        check_version()
    except UserError as error:
        wrong.append(str(error))
    wrong += [] if mistakes else space_mistakes(settings)
    found = {
        "mistakes": [f"{node}: {sentence}" for sentence in wrong],
        "troubles": troubles_on(node),
        "gpu_count": assigned_gpus(),
        "gpus": driver_gpus()[: assigned_gpus()],
        "efa_count": int(os.environ.get("EFA_COUNT", 0)),
        "efa_plugin": efa_plugin(),
        "seen": {str(path): fingerprint(path) for path in shared},
    }
    try:
        write_atomically(folder / f"{node}.json", json.dumps(found))
    except OSError as error:
        raise UserError(
            f"{node}: can't write {folder} ({error.strerror}); let uid {os.getuid()} write there"
        ) from None


def space_mistakes(settings: TrainConfig) -> list[str]:
    """A sentence where the run folder's file system has no room for the checkpoints to come."""
    folder, keep = run_folder(settings), settings.checkpoint.keep_checkpoints
    there = len(committed(folder / CHECKPOINTS))
    to_come = max(
        1, keep + 1 - there
    )  # one more than are kept: the oldest goes when the newest is committed
    needed, free = (
        to_come * CHECKPOINT_BYTES * parameter_count(settings.model),
        shutil.disk_usage(folder).free,
    )
    if free >= needed:
        return []
    return [
        f"{free / 1e9:.1f} GB free for {folder}, but {to_come} checkpoints to come need {needed / 1e9:.1f} GB; "
        "free some, lower keep_checkpoints, or set save_ckpt_path to another file system"
    ]


def troubles_on(node: str) -> list[str]:
    """What is broken on this node, as sentences."""
    assigned, shown = assigned_gpus(), len(driver_gpus())
    if shown >= assigned:
        return []
    return [
        f"{node}: Slurm assigned {assigned} GPUs, but the driver shows {shown}; look at `nvidia-smi` there and "
        f"take the node out: scontrol update nodename={node} state=drain reason=gpu"
    ]


def fingerprint(path: Path) -> str:
    """Something that differs when two nodes don't see the same file or folder; "missing" where there is none."""
    if path.is_dir():
        return " ".join(sorted(os.listdir(path)))
    return f"{path.stat().st_size} {path.stat().st_mtime_ns}" if path.exists() else "missing"


def judge(folder: Path, nodes: Sequence[str]) -> int:
    """Print a line for each of the `nodes` (host names) and what is wrong with it.

    Returns the exit code: 0, or 2 for what a user has to fix, or 1 for trouble that may be gone at the next start.
    """
    reports = {
        node: json.loads(path.read_text())
        for node in nodes
        if (path := folder / f"{node}.json").is_file()
    }
    mistakes = [sentence for report in reports.values() for sentence in report["mistakes"]]
    troubles = [sentence for report in reports.values() for sentence in report["troubles"]]
    if troubles and not any(report["gpus"] for report in reports.values()):
        mistakes, troubles = [*mistakes, no_gpu_anywhere()], []
    troubles += [
        f"{node}: no answer that the first node could read; look at its lines above. If there are none it is "
        f"down: scontrol show node {node}, and submit again with --exclude={node}"
        for node in nodes
        if node not in reports
    ]
    for index, (node, report) in enumerate(reports.items()):
        kind = f" {report['gpus'][0]}" if report["gpus"] else ""
        print(
            f"node {index}     {node}: {report['gpu_count']} GPUs{kind}, {report['efa_count']} EFA devices"
        )
    without = [
        node for node, report in reports.items() if report["efa_count"] and not report["efa_plugin"]
    ]
    if without:
        print(
            f"warning: {', '.join(without)}: EFA devices, but no libnccl-net.so (aws-ofi-nccl) for NCCL to use them "
            "by, so it takes TCP; build the image with INSTALL_EFA=1 (docs/image.md)",
            file=sys.stderr,
        )
    gpus = {
        node: f"{report['gpu_count']} GPUs {sorted(set(report['gpus']))}"
        for node, report in reports.items()
    }
    troubles += disagreements(
        gpus,
        "choose one kind with --partition or --constraint, or leave the node out with "
        "--exclude={node}",
    )
    efa = {node: f"{report['efa_count']} EFA devices" for node, report in reports.items()}
    troubles += disagreements(
        efa, "look at `fi_info -p efa` there, or submit again with --exclude={node}"
    )
    for path in next(iter(reports.values()))["seen"] if reports else {}:
        mistakes += mistakes_about(
            path, {node: report["seen"][path] for node, report in reports.items()}
        )
    for sentence in mistakes + troubles:
        print(f"error: {sentence}", file=sys.stderr)
    return 2 if mistakes else 1 if troubles else 0


def no_gpu_anywhere() -> str:
    """What to mend where Slurm assigned GPUs and no node shows one: hardly the nodes."""
    image = os.environ.get("IMAGE")
    if not image:
        return "no node shows a GPU, though Slurm assigned some: is NVIDIA's driver loaded? nvidia-smi must list them"
    return (
        f"the image {image} shows no GPU on any node, though Slurm assigned some: build it from this Dockerfile, "
        "which sets NVIDIA_VISIBLE_DEVICES and NVIDIA_DRIVER_CAPABILITIES for Enroot's hook 98-nvidia.sh; the "
        "nodes need that hook and nvidia-container-cli"
    )


def mistakes_about(path: str, seen: Mapping[str, str]) -> list[str]:
    """Sentences on a path that nodes see differently or not at all: `seen`, {node: its fingerprint}."""
    missing = [node for node, what in seen.items() if what == "missing"]
    if len(missing) == len(seen):
        return [
            f"there is no {path} on any node; make it with get_dataset.py (with an image: sbatch 2.tokenize.sbatch "
            "INPUT OUT), or correct the setting"
        ]
    if missing:
        return [
            f"{node}: there is no {path}; mount the shared file system there, or correct the setting"
            for node in missing
        ]
    first = next(iter(seen.values()))
    found = {node: path if what == first else f"another {path}" for node, what in seen.items()}
    return disagreements(
        found, "it must be one shared folder: mount the same file system on {node}"
    )


def disagreements(found: Mapping[str, str], remedy: str) -> list[str]:
    """A sentence for each node that differs from the first in what it has: `found`, {node: words}."""
    (first, expected), *others = found.items() or [("", "")]
    return [
        f"{node}: it has {words}, {first} has {expected}; {remedy.format(node=node)}"
        for node, words in others
        if words != expected
    ]
