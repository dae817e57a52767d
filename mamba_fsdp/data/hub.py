"""The Hugging Face Hub, asked once whether it answers: its own libraries ask for a minute, in many lines."""

import functools
import os
import socket
import urllib.parse
import urllib.request

SECONDS = 5.0  # to answer in


@functools.cache
def why_offline() -> str:
    """ "" where the Hub answers, else why not. HF_HUB_OFFLINE decides without asking, HF_ENDPOINT names another place;
    behind a proxy it is not asked."""
    told = os.environ.get("HF_HUB_OFFLINE", "0").upper()
    if told in ("1", "ON", "YES", "TRUE"):
        return "HF_HUB_OFFLINE is set"
    if urllib.request.getproxies():
        return ""
    place = urllib.parse.urlsplit(os.environ.get("HF_ENDPOINT") or "https://huggingface.co")
    try:
        port = place.port or socket.getservbyname(place.scheme)
        socket.create_connection((place.hostname or "", port), SECONDS).close()
    except OSError as error:
        return f"{place.hostname}: {error.strerror or error}"
    return ""
