"""Where metrics go besides metrics.jsonl: TensorBoard's and Prometheus's files in the run folder, Weights & Biases."""

import contextlib
import importlib
import math
import os
import re
import uuid
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import yaml

from mamba_fsdp.errors import UserError, first_line
from mamba_fsdp.report.records import numbers_of, read
from mamba_fsdp.run_layout import METRICS, PROMETHEUS, TENSORBOARD, WANDB_ID
from mamba_fsdp.storage import write_atomically

GROUPS = {
    "val": "validation",
    "source": "data",
    "data": "data",
    "gpu": "device",
    "memory": "device",
    "mfu": "time",
    "goodput": "time",
    "checkpoint": "time",
    "slowest": "time",
    "median": "time",
}  # by a metric's first word


def tag_of(metric: str) -> str:
    """Its group and name, as in validation/val_loss."""
    group = (
        "time"
        if metric.startswith("tokens_per_second")
        else GROUPS.get(metric.partition("_")[0], "train")
    )
    return f"{group}/{metric}"


def make_trackers(
    kinds: Collection[str],
    run_folder: Path,
    settings: dict,
    step: int,
    project: str = "",
    name: str = "",
    say: Callable[[str], None] = print,
) -> list[Any]:
    """For a run that resumes from `step`; project, name: in W&B. Each has `close` and `write(entry)`, an entry of
    the metrics. Where W&B refuses, a line says so and it is left out. Raises UserError where a package is missing."""
    trackers: list[Any] = (
        [TensorBoard(run_folder, settings, step)] if "tensorboard" in kinds else []
    )
    trackers += [Prometheus(run_folder)] if "prometheus" in kinds else []
    if "wandb" in kinds:
        try:
            trackers.append(WeightsAndBiases(run_folder, settings, project, name))
            say(f"tracker    W&B: {trackers[-1].place}")
        except ConnectionRefusedError as refusal:
            say(
                f"tracker    W&B is off: {refusal}; training does without it. `wandb login` or WANDB_API_KEY logs in, "
                "WANDB_MODE=offline records into the run folder"
            )
    return trackers


def _package(module, package):
    try:
        return importlib.import_module(module)
    except ImportError:
        raise UserError(
            f"this tracker needs its package: .venv/bin/pip install {package}"
        ) from None


class TensorBoard:
    def __init__(self, run_folder: Path, settings: dict, step: int) -> None:
        # What an interrupted run wrote after `step` is dropped, as in metrics.jsonl: these steps come again.
        self.writer = _package("torch.utils.tensorboard", "tensorboard").SummaryWriter(
            str(run_folder / TENSORBOARD), purge_step=step + 1 if step else 0
        )
        self.close = self.writer.close
        text = yaml.safe_dump(settings, sort_keys=False)
        self.writer.add_text(
            "settings", re.sub("^", "    ", text, flags=re.MULTILINE), step
        )  # as it is, for Markdown

    def write(self, entry: dict) -> None:
        for name, value in numbers_of(entry).items():
            if value is not None:
                self.writer.add_scalar(tag_of(name), value, entry["step"])


class Prometheus:
    """The latest numbers as a file for node exporter's textfile collector."""

    def __init__(self, run_folder: Path) -> None:
        self.client, self.close = _package("prometheus_client", "prometheus_client"), lambda: None
        self.run, self.registry = str(run_folder.resolve()), self.client.CollectorRegistry()
        self.path, self.gauges = run_folder / PROMETHEUS / "metrics.prom", dict[str, Any]()
        self.path.parent.mkdir(exist_ok=True)

    def write(self, entry: dict) -> None:
        for name, value in {"step": entry["step"], **numbers_of(entry)}.items():
            metric, *source = name.split("/", 1)
            if metric not in self.gauges:
                self.gauges[metric] = self.client.Gauge(
                    f"mamba_fsdp_{metric}",
                    f"{metric} of a training run",
                    ["run", "source"][: 1 + len(source)],
                    registry=self.registry,
                )
            self.gauges[metric].labels(self.run, *source).set(math.nan if value is None else value)
        with contextlib.suppress(OSError):  # what matters is in metrics.jsonl, which complains
            self.client.write_to_textfile(str(self.path), self.registry)


class WeightsAndBiases:
    """One W&B run per run folder, which keeps its id, so that a resumed run continues the same curves. W&B can't drop
    what comes again: that is not sent again; what a kill kept from being sent, metrics.jsonl still has."""

    def __init__(self, run_folder: Path, settings: dict, project: str, name: str) -> None:
        """Raises ConnectionRefusedError where W&B refuses."""
        self.wandb, self.kept = _package("wandb", "wandb"), run_folder / WANDB_ID
        if not self.kept.exists():
            write_atomically(self.kept, uuid.uuid4().hex)
        self.id, last = [*self.kept.read_text().split(), "-1"][:2]
        recorded = _last_recorded(run_folder, int(last))
        os.environ.setdefault("WANDB_SILENT", "true")  # it would print some forty lines
        try:
            online = (mode := self.wandb.setup().settings.mode) == "online"
            if online and not self.wandb.api.api_key:  # it would ask for one
                raise ConnectionRefusedError("nobody is logged in")
            self.run = self.wandb.init(
                project=project or os.environ.get("WANDB_PROJECT") or "mamba-fsdp",
                id=self.id,
                name=name or os.environ.get("WANDB_NAME") or run_folder.name,
                resume="allow" if online else None,
                dir=str(run_folder),
                config=settings,
            )
        except Exception as error:  # its errors have no common class in all its versions
            raise ConnectionRefusedError(first_line(error)) from None
        self.place = self.run.url if online else f"{mode}, in {run_folder}/wandb"
        self.next_step = self.run.step if self.run.resumed else recorded + 1
        self.close = self.run.finish
        for entry in read(run_folder / METRICS):
            self.write(entry)

    def write(self, entry: dict) -> None:
        if entry["step"] < self.next_step:
            return
        self.run.log(
            {tag_of(name): value for name, value in numbers_of(entry).items()}, step=entry["step"]
        )
        self.next_step = entry["step"]
        with contextlib.suppress(OSError):
            write_atomically(self.kept, f"{self.id} {self.next_step}")


def _last_recorded(run_folder, sent):
    """The last step in the files of W&B's offline mode, to which a killed run has not written all that was `sent`."""
    files, steps = [*run_folder.glob("wandb/offline-run-*/*.wandb")], [-1]
    for file in files:
        with contextlib.suppress(Exception):  # such a file may end anywhere
            from wandb.proto.wandb_internal_pb2 import Record
            from wandb.sdk.internal.datastore import DataStore

            store = DataStore()
            store.open_for_scan(str(file))
            for record in map(Record.FromString, iter(store.scan_data, None)):
                steps += [record.history.step.num] if record.HasField("history") else []
    return max(steps) if files else sent
