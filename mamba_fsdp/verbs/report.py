"""python -m mamba_fsdp report RUN [RUN ...] [--out=FILE.html]

Write a report about one or more runs, finished or still training, as one HTML
file that works offline. It shows curves over steps, tokens or time, the
settings and their differences, the mixture of the data, restarts and
checkpoints (docs/watching.md).
"""

import shlex
from dataclasses import dataclass
from pathlib import Path

from mamba_fsdp.data.tokenizer import identities_in
from mamba_fsdp.errors import UserError, command
from mamba_fsdp.fields import setting
from mamba_fsdp.importing.kinds import classify_path, unexpected_path_error
from mamba_fsdp.reporting.page import make_page
from mamba_fsdp.run.names import REPORT, TOKENIZER
from mamba_fsdp.storage.retry import make_folder, write_for_user


@dataclass
class Options:
    out: str = setting("", is_path=True, elsewhere="output output_dir")
    """The file to write, or a folder for it. Empty: report.html in the first RUN."""


def main(*runs: str, options: Options) -> None:
    print(report(*runs, options=options))


def report(*runs: str | Path, options: Options) -> Path:
    """Writes a report about runs as one HTML file.

    runs: paths of run folders. Returns the path of the file. Raises UserError for a path that is not a run, and if the file
    can't be written."""
    out = options.out
    folders = {Path(run).resolve(): Path(run) for run in runs}  # without duplicates
    if not folders:
        raise UserError("no run folder was given; give at least one")
    for folder in folders.values():
        place = classify_path(folder)
        if place.kind == "runs":
            named = " ".join(shlex.quote(str(folder / name)) for name in place.names)
            raise unexpected_path_error(
                folder, "a run", f"{command('report')} {named} shows them in one file"
            )
        if place.kind != "run":
            raise unexpected_path_error(folder, "a run")
    tokenizers = {next(identities_in(folder / TOKENIZER), "") for folder in folders}
    page = make_page([*folders.values()], tokenizers_differ=len(tokenizers - {""}) > 1)
    file = Path(out) if out else Path(runs[0]) / REPORT
    if file.suffix != ".html":
        file /= REPORT
    try:
        make_folder(file.parent, parents=True)
        write_for_user(file, page)
    except OSError as error:
        raise UserError(
            f"{error.filename}: can't be written ({error.strerror}); give another path with --out"
        ) from None
    return file
