"""What our own JSON files say of themselves, format and version; those that this program can't read are refused."""

from pathlib import Path
from typing import NamedTuple

from mamba_fsdp.errors import UserError


class Format(NamedTuple):
    name: str
    version: int  # a new one whenever this program, as it is, would read a file wrongly
    oldest: int  # version that it still reads

    def header(self) -> dict[str, str | int]:
        """The fields that a file of this format begins with."""
        return {"format": self.name, "version": self.version}

    def check(self, path: Path, content: dict) -> None:
        """Raises UserError unless `content`, of the file `path`, says this format and a version (none: 1) it reads."""
        name, version = content.get("format", self.name), content.get("version", 1)
        if name != self.name:
            raise UserError(f"{path}: written as {name!r}; this program reads {self.name!r} here")
        if version not in range(self.oldest, self.version + 1):
            writer = "a newer" if isinstance(version, int) and version > self.version else "another"
            readable = (
                f"{self.oldest} to {self.version}" if self.oldest < self.version else self.version
            )
            raise UserError(
                f"{path}: a {name} of version {version}, which {writer} version of this program wrote; "
                f"this one reads version {readable}"
            )


CHECKPOINT = Format("mamba_fsdp checkpoint", 3, oldest=1)
TOKEN_STORE = Format("mamba_fsdp token store", 1, oldest=1)
DATASET = Format("mamba_fsdp dataset", 1, oldest=1)
