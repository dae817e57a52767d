"""A file of another launcher, YAML or a script with its command line, as YAML of ours: `settings --from` prints it."""

import re
from pathlib import Path

from config import resolve
from config.elsewhere import DEFAULTS, LAUNCHERS, names
from config.fields import Duration, near_name
from mamba_fsdp.errors import UserError


def brought(launcher: str, file: str) -> str:
    """The YAML. Raises UserError for an unknown launcher, and for a file that can't be read or makes no run."""
    choice = f"choose one of {', '.join(LAUNCHERS)}"
    if launcher not in LAUNCHERS:
        raise UserError(f"--from={launcher}: {near_name(launcher, LAUNCHERS, choice)}")
    path = Path(file)
    if not path.is_file():
        raise UserError(f"--from={launcher}: there is no file {file or '(give one)'}")
    yaml = path.suffix in (".yaml", ".yml")
    given = resolve.flatten(resolve.load_yaml(path), path) if yaml else words_of(path)
    unknown = {
        key: f"{key}={text} holds a variable of the shell; give its value"
        for key, text in given.items()
        if "$" in str(text)
        and not key.isupper()
        and not (key in names() and names()[key].changes_nothing())
    }
    theirs = resolve.Place(
        {key: text for key, text in given.items() if key not in unknown}, f"in {path}"
    )
    their_name = LAUNCHERS[launcher]
    usual = resolve.Place(DEFAULTS[launcher], f"in {their_name}")
    resolve.leave_out(usual.chosen, theirs.chosen)
    chosen = {**usual.chosen, **theirs.chosen}
    pointless = resolve.pointless(chosen)
    lines = [f"# {path} of {their_name}, read by python -m mamba_fsdp settings --from={launcher}"]
    lines += [_line(name, theirs) for name in theirs.chosen if name not in pointless]
    lines += ["", f"# what {their_name} takes where nothing is given"]
    lines += [
        _line(name, usual) for name in usual.chosen if name not in {*theirs.chosen, *pointless}
    ]
    needless = {key: note for key, note in theirs.notes.items() if " changes nothing here" in note}
    without = unknown | theirs.mistakes | needless
    without |= {
        theirs.taken[name].key: words.partition(";")[0]
        for name, words in pointless.items()
        if name in theirs.chosen
    }
    if without:
        lines += [
            "",
            "# without a counterpart",
            *(f"# {' '.join(words.split())}" for words in without.values()),
        ]
    return "\n".join(lines) + "\n"


def words_of(path: Path) -> dict[str, str]:
    """{name: value} of the --name=value, --name value and --name words of a script, and of its NAME=value lines that
    the table knows. Comments don't count; of a word given twice the last does."""
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: can't be read: {error}") from None
    text = re.sub(r"^\s*#.*$|\s#\s.*$", "", text, flags=re.M).replace("\\\n", " ")
    variables = re.findall(r'^\s*(?:export\s+|: "\$\{)?([A-Z_]+):?=([^\s}]+)', text, flags=re.M)
    found = {name: value for name, value in variables if name in names()}
    words = re.findall(
        r"--[\w.-]+(?:=(?:\"[^\"]*\"|'[^']*'|[^\s\"'()]*))?|[^\s\"'()]+|[\"'()\n]", text
    )
    for word, after in zip(words, [*words[1:], "\n"]):
        if not re.match(r"--[A-Za-z]", word):
            continue
        name, has_value, value = word[2:].partition("=")
        if not has_value:
            value = "true" if re.match(r"[-\"'()\n\\]", after) else after
        found[name.replace("-", "_")] = value.strip("\"'")
    return found


def _line(name: str, place: resolve.Place) -> str:
    """`name: value`, with the word that it was given by where that is another."""
    import yaml

    value, key = place.chosen[name], place.taken[name].key
    written = (
        str(value)
        if isinstance(value, Duration)
        else yaml.safe_dump(value, default_flow_style=True, width=1000)
    )
    written = written.removesuffix("\n").removesuffix("\n...")
    return f"{name}: {written}" + (
        f"  # {key.rpartition('.')[2]}" if key.rpartition(".")[2] != name else ""
    )
