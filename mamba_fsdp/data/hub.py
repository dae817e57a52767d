"""Decides whether a name can be one on the Hugging Face Hub, and whether the Hub can be reached."""

import functools
import os
import socket
import sys
from pathlib import Path
from urllib.request import getproxies

from mamba_fsdp.errors import UserError
from mamba_fsdp.importing.kinds import input_kind
from mamba_fsdp.text import suggest_path

HUB = ("huggingface.co", 443)
HUB_SECONDS = 5.0  # the time that the Hub has to answer


@functools.cache  # so that it prints and tries only once for each name
def prepare_hub(name: str) -> None:
    """Prints that the Hub is asked for a name, and makes libraries work without the Hub if it can't be reached.

    Libraries try for half a minute to reach the Hub. If it does not answer, an environment variable makes libraries
    that are imported later use only their cache. Raises UserError for a name that looks like a path.
    """
    name = os.path.expanduser(name)
    hint = suggest_path(Path(name))
    if not name or name.startswith((".", "/")) or name.count("/") > 1 or input_kind(Path(name)):
        raise UserError(f"{name}: there is no such file or folder{hint}")
    message = f"asking the Hugging Face Hub for {name}: no file or folder has this name here{hint}"
    print(message, file=sys.stderr, flush=True)
    if "HF_HUB_OFFLINE" not in os.environ and not _hub_answers():
        print("the Hub can't be reached; looking in its cache", file=sys.stderr, flush=True)
        os.environ["HF_HUB_OFFLINE"] = "1"


def _hub_answers() -> bool:
    """Returns whether the Hub accepts a connection. Returns True without trying if there is a proxy or a mirror."""
    if getproxies() or "HF_ENDPOINT" in os.environ:
        return True
    try:
        socket.create_connection(HUB, HUB_SECONDS).close()
    except OSError:
        return False
    return True
