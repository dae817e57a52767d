"""What a file is, by its content: an archive or a picture is not taken for text, nor text for anything else."""

import bz2
import gzip
import io
import lzma
import pickle
import tarfile

import pytest
import zstandard

from mamba_fsdp.storage.signatures import content_of

pytestmark = pytest.mark.torch22


def archive(mode):
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode=mode) as archive:
        archive.addfile(tarfile.TarInfo("a.txt"))
    return content.getvalue()


PAGE = b" <!DOCTYPE html><html>sign in</html>"
CONTENTS = [
    ("tar", archive("w")),
    ("tar", archive("w:gz")),
    ("zip", b"PK\3\4\n\0"),
    ("gzip", gzip.compress(gzip.compress(b"text"))),
    ("bz2", zstandard.compress(bz2.compress(b"text"))),
    ("xz", gzip.compress(lzma.compress(b"text"))),
    ("zstd", bz2.compress(zstandard.compress(b"text"))),
    ("pdf", lzma.compress(b"%PDF-1.7\n")),
    ("pickle", pickle.dumps(["text"])),
    ("lfs", b"version https://git-lfs.github.com/spec/v1\n"),
    ("annex", b"/annex/objects/MD5-s1--0\n"),
    ("binary", b"ids\0\1"),
    ("", "text".encode("utf-16")),
    ("", b"text"),
    ("", PAGE),
]


def test_content_says_what_a_file_is(tmp_path):
    """Also what is compressed in it."""
    file = tmp_path / "file"
    for name, content in CONTENTS:
        file.write_bytes(content)
        found = content_of(file)
        assert (found.name if found else "") == name, content
    assert content_of(tmp_path) is None
