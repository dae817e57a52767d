"""The built-in corpus: the source files of Python's own standard library, real text that is on every machine."""

import sysconfig
from pathlib import Path

from mamba_fsdp.errors import UserError

LEFT_OUT = {"site-packages", "dist-packages", "__pycache__"}


def corpus_files():
    """The running interpreter's library as a sorted list of UTF-8 .py files. Raises UserError where it ships without
    sources."""
    root = Path(sysconfig.get_path("stdlib"))
    files = [path for path in sorted(root.rglob("*.py"), key=lambda path: path.relative_to(root).as_posix())
             if not LEFT_OUT.intersection(path.relative_to(root).parts) and _is_utf8(path)]
    if not files:
        raise UserError(f"{root}: this Python comes without its library's source files; name a text of your own as "
                        "INPUT")
    return files


def _is_utf8(path):
    """Some of Python's own tests are written in other encodings, or broken on purpose."""
    try:
        path.read_bytes().decode()
        return True
    except UnicodeDecodeError:
        return False
