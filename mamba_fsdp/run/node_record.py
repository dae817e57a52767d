"""Records the nodes that a run has lost, and those that were sick: nodes.jsonl in the run folder. For the cluster's own
Python too, which may be 3.6.

A line is one JSON object: time (UTC), job, node, kind (lost or sick), reason, last_seen (seconds since the epoch). Whoever
deletes the file, or a line, clears what it says; after a day it no longer counts.
"""

import json
import os
import time
from typing import Any, Dict, List

from mamba_fsdp.run.names import NODES

LOST = "lost"
SICK = "sick"
SECONDS_OF_SUSPICION = 86400
MAX_BYTES = 1 << 20  # of the file's end; a line has some hundred


def add_record(
    run_folder: str, job: str, node: str, kind: str, reason: str, last_seen: float
) -> None:
    """Appends a line. Raises OSError if the run folder can't be written."""
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
    """Returns the lines of the record, oldest first, without damaged ones; [] if there is none. Raises OSError if the
    file can't be read."""
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
    """Returns why each node was sick in the last day. Raises OSError as read_records does."""
    earliest = time.time() - SECONDS_OF_SUSPICION
    return {
        str(record.get("node")): str(record.get("reason"))
        for record in read_records(run_folder)
        if record.get("kind") == SICK and record["last_seen"] > earliest
    }
