"""Identifies the code that a run executes."""

import hashlib

from mamba_fsdp.errors import PROJECT
from mamba_fsdp.storage.retry import read_bytes


def code_digest() -> str:
    """Returns a SHA-256 digest of the files of this package, except compiled files. Equal code has
    an equal digest."""
    digest = hashlib.sha256()
    for path in sorted(PROJECT.glob("mamba_fsdp/**/*.*")):
        if path.suffix != ".pyc":
            digest.update(read_bytes(path))
    return digest.hexdigest()
