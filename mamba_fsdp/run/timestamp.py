"""Formats the time of a record in the run folder."""

import datetime


def utc_timestamp() -> str:
    """Returns the current time in UTC, in ISO 8601 format and to the second."""
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
