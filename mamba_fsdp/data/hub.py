"""The Hugging Face Hub, asked once whether it answers: its own libraries ask for a minute, in many lines."""

import os
import ssl
import sys
import threading
import urllib.error
import urllib.request

SECONDS = 5.0  # to answer in


def why_offline() -> str:
    """ "" where the Hub answers, else why not: its libraries then take only what lies here.

    HF_HUB_OFFLINE decides without asking, HF_ENDPOINT names another place, and proxies are those of the environment.
    """
    if (told := os.environ.get("HF_HUB_OFFLINE")) is not None:
        return "HF_HUB_OFFLINE is set" if told.upper() in ("1", "ON", "YES", "TRUE") else ""
    place, reason = (
        os.environ.get("HF_ENDPOINT") or "https://huggingface.co",
        [f"no answer in {SECONDS:g} s"],
    )
    # In a thread: a name server that is silent knows no time limit.
    asking = threading.Thread(target=lambda: reason.append(_why_silent(place)), daemon=True)
    asking.start()
    asking.join(SECONDS)
    if reason[-1]:
        os.environ["HF_HUB_OFFLINE"] = "1"
        for name in {"huggingface_hub.constants", "datasets.config"} & {
            *sys.modules
        }:  # read it when imported
            vars(sys.modules[name])["HF_HUB_OFFLINE"] = True
    return reason[-1] and f"{place}: {reason[-1]}"


def _why_silent(place):
    proxies = urllib.request.getproxies()
    if "all" in proxies or any(proxy.startswith("socks") for proxy in proxies.values()):
        return ""  # which the libraries can use, but not Python's own
    try:
        urllib.request.urlopen(
            urllib.request.Request(place, method="HEAD"), timeout=SECONDS
        ).close()
    except urllib.error.HTTPError:
        return ""  # an answer
    except OSError as error:
        reason = getattr(error, "reason", error)
        return (
            ""
            if isinstance(reason, ssl.SSLError)
            else str(getattr(reason, "strerror", None) or reason)
        )
    return ""
