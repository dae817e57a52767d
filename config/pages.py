"""The second part of docs/from-*.md, made from the table: `python -m config.pages` writes it below the mark."""

from collections.abc import Mapping
from pathlib import Path

from config.elsewhere import ANYTHING, LAUNCHERS, TABLE, Foreign

DOCS = Path(__file__).resolve().parents[1] / "docs"
MARK = "<!-- From here on made by: python -m config.pages -->\n"


def page(launcher: str) -> str:
    """The whole page of a launcher: what stands above the mark, and the table."""
    above = (DOCS / f"from-{launcher}.md").read_text().partition(MARK)[0]
    rows = [row for row in TABLE if launcher in row.launchers.split()]
    equal = ", ".join(f"`{row.names}`" for row in rows if row.names == row.ours and _is_same(row))
    other = [
        f"| {', '.join(f'`{name}`' for name in row.names.split())} | {_here(row)} |"
        for row in rows
        if row.names != row.ours or not _is_same(row)
    ]
    return "\n".join(
        [
            above + MARK,
            "## Every setting",
            "",
            f"The same here: {equal}.",
            "",
            "| there | here |",
            "|---|---|",
            *other,
            "",
        ]
    )


def _is_same(row: Foreign) -> bool:
    return row.values == {ANYTHING: ANYTHING}


def _here(row: Foreign) -> str:
    values = row.values if isinstance(row.values, Mapping) else {}
    if not row.ours:
        only = [value for value in values if value != ANYTHING]
        said = "not needed" if row.changes_nothing() else "none"
        fine = f" (`{'`, `'.join(only)}` changes nothing)" if only else ""
        return f"{said}{fine}: {row.words}" if values else row.words
    each = "; ".join(_value(theirs, ours) for theirs, ours in values.items() if ours != ANYTHING)
    setting = " and ".join(f"`{name}`" for name in row.ours.split())
    return setting + (f": {each}" if each else "") + (f" ({row.words})" if row.words else "")


def _value(theirs: str, ours: str | None) -> str:
    if ours is None:
        return f"`{theirs}` changes nothing"
    theirs = "anything else" if theirs == ANYTHING else f"`{theirs}`"
    return f"{theirs} none: {ours[1:]}" if ours.startswith("!") else f"{theirs} is `{ours}`"


if __name__ == "__main__":
    for name in LAUNCHERS:
        (DOCS / f"from-{name}.md").write_text(page(name))
