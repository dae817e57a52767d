"""Records lost and sick nodes of a run in nodes.jsonl in the run folder.

Each line is one JSON object: time (UTC), job, node, kind (lost or sick), reason, last_seen (seconds since the epoch). For
a day, later starts train on a sick node only if there are not enough other nodes. If the line
of a node or the whole file is deleted, later starts use the node like any other.

The launcher imports this module with the cluster's own Python, so it must run on Python 3.6.
"""

import json
import os
import time
from typing import Any, Dict, List

from mamba_fsdp.run.names import NODES

LOST = "lost"
SICK = "sick"
SICK_SECONDS = 86400
MAX_BYTES = 1 << 20  # only the end of a longer file is read; a line has some hundred bytes


def add_record(
    run_folder: str, job: str, node: str, kind: str, reason: str, last_seen: float
) -> None:
    """Appends a line to nodes.jsonl. Raises OSError if the file can't be written."""
    content = {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S+00:00", time.gmtime()),
        "job": job,
        "node": node,
        "kind": kind,
        "reason": reason,
        "last_seen": round(last_seen, 1),
    }
    with open(os.path.join(run_folder, NODES), "a") as file:
        file.write(json.dumps(content) + "\n")


def read_records(run_folder: str) -> List[Dict[str, Any]]:
    """Returns the lines of nodes.jsonl, oldest first, without damaged ones; [] if the file does not exist.

    Raises OSError if the file can't be read.
    """
    path = os.path.join(run_folder, NODES)
    if not os.path.isfile(path):
        return []
    with open(path, "rb") as file:
        file.seek(max(0, os.path.getsize(path) - MAX_BYTES))
        lines = file.read().decode(errors="replace").split("\n")
    records = []
    for line in lines:
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict) and isinstance(record.get("last_seen"), (int, float)):
            records.append(record)
    return records


def sick_nodes(run_folder: str) -> Dict[str, str]:
    """Returns {node: reason} of the nodes that were sick in the last day.

    Raises OSError if nodes.jsonl can't be read.
    """
    earliest = time.time() - SICK_SECONDS
    return {
        str(record.get("node")): str(record.get("reason"))
        for record in read_records(run_folder)
        if record.get("kind") == SICK and record["last_seen"] > earliest
    }
