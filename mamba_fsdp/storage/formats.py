"""Marks this program's files with their format and version, and rejects files that the program can't read."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mamba_fsdp.errors import UserError


@dataclass(frozen=True)
class Format:
    """A file format of this program."""

    name: str
    version: int  # increase it if older versions of the program would misread new files

    def header(self) -> dict[str, str | int]:
        """Returns the fields at the beginning of each file of this format."""
        return {"format": self.name, "version": self.version}

    def reads(self, content: dict) -> bool:
        """Returns whether a file with this `content` has this format and the version that this program reads."""
        return self.header().items() <= content.items()

    def body(self, path: Path, content: dict[str, Any]) -> dict[str, Any]:
        """Returns the fields of a file without its header.

        path: the file, for messages. content: all its fields. Raises UserError if the file has another format or version."""
        if not self.reads(content):
            raise UserError(
                f"{path}: the file has the format {content.get('format')!r} of version {content.get('version')}, but this version of "
                f"the program reads {self.name!r} of version {self.version}; use the version that wrote the file"
            )
        return {name: value for name, value in content.items() if name not in self.header()}


CHECKPOINT = Format("mamba_fsdp checkpoint", 1)
TOKEN_STORE = Format("mamba_fsdp token store", 1)
DATASET = Format("mamba_fsdp dataset", 1)
