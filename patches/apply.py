"""Gives the installed Triton its rank-0-only cache writer; fails if it does not fit. Run by the Python that has Triton.

    python patches/apply.py                   patch, or say that it is done already
    python patches/apply.py --check           change nothing; exit 1 if it is not done
    python patches/apply.py --site=FOLDER     another folder that holds triton/ (default: the one of this Python)

Triton 2.2.0 is patched by triton-2.2.0-rank0-cache.patch, checked by hash before and after. Triton 3.4 and newer has a
setting for the class, so only the class's file is put in place; TRITON_CACHE_MANAGER then has to name it.
"""

import argparse
import hashlib
import importlib.util
import os
import re
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
PATCH = HERE / "triton-2.2.0-rank0-cache.patch"
PATCHED_VERSION = "2.2.0"
ORIGINAL_HASH = "d971a5b8841cf55a410dc7f28781f75e807f95d28e2c4f3b6471516f1d746b36"
PATCHED_HASH = "7252a50a3318d156b25b833adb9950051379d5f1f0fff435880f804eb14c00b8"
MANAGER = "triton.runtime.rank0_cache:Rank0CacheManager"


class DoesNotFit(Exception):
    """The installed Triton is not one that the patch was made for."""


def apply_hunks(text, patch):
    """Returns `text` with the unified diff `patch` applied. Every line must be exactly where the patch says."""
    lines, result, position = text.splitlines(keepends=True), [], 0
    hunks = re.split(r"^@@ -(\d+)(?:,\d+)? \+\d+(?:,\d+)? @@.*\n", patch, flags=re.MULTILINE)
    for start, body in zip(hunks[1::2], hunks[2::2]):
        result += lines[position : int(start) - 1]
        position = int(start) - 1
        for line in body.splitlines(keepends=True):
            mark, content = line[0], line[1:]
            if mark in " -":
                if position >= len(lines) or lines[position] != content:
                    raise DoesNotFit(
                        f"line {position + 1} is not the one the patch expects: {content.rstrip()!r}"
                    )
                position += 1
            if mark in " +":
                result.append(content)
    return "".join(result + lines[position:])


def replace(path, data):
    """Writes bytes so that a process that imports at this moment sees the old file or the new one."""
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        file.write(data)
    os.chmod(file.name, 0o644)
    os.replace(file.name, path)


def find_triton(site):
    """Returns (triton's folder, its version) without importing it, which would need a GPU driver in some versions."""
    if site is None:
        spec = importlib.util.find_spec("triton")
        if spec is None or spec.origin is None:
            raise DoesNotFit(
                f"{sys.executable} has no Triton; install the stack's requirements first"
            )
        folder = Path(spec.origin).parent
    else:
        folder = Path(site) / "triton"
    try:
        return folder, re.search(
            r"^__version__ = '([^']+)'", (folder / "__init__.py").read_text(), re.MULTILINE
        )[1]
    except (OSError, TypeError):
        raise DoesNotFit(f"{folder} holds no Triton with a readable version") from None


def apply(folder, version, check):
    """Patches the Triton in `folder`. Returns whether anything had to be changed, or with `check` would have to be."""
    changes = {}
    module = folder / "runtime" / "cache.py"
    source = module.read_bytes()
    if version == PATCHED_VERSION:
        digest = hashlib.sha256(source).hexdigest()
        if digest == ORIGINAL_HASH:
            changes[module] = apply_hunks(source.decode(), PATCH.read_text()).encode()
            if hashlib.sha256(changes[module]).hexdigest() != PATCHED_HASH:
                raise DoesNotFit(
                    f"{PATCH.name} gives another file than it was made for; restore it from git"
                )
        elif digest != PATCHED_HASH:
            raise DoesNotFit(
                f"{module} is neither Triton {version}'s own file nor the patched one (SHA-256 {digest}); "
                "reinstall Triton: pip install --force-reinstall --no-deps triton==2.2.0"
            )
    elif (
        tuple(int(part) for part in version.split(".")[:2]) < (3, 4)
        or b"manager_class" not in source
    ):
        raise DoesNotFit(
            f"Triton {version} is not known here: the patch is for {PATCHED_VERSION}, the class for 3.4 and newer"
        )
    policy = folder / "runtime" / "rank0_cache.py"
    wanted = (HERE / "rank0_cache.py").read_bytes()
    if not policy.exists() or policy.read_bytes() != wanted:
        changes = {policy: wanted, **changes}  # the class first, since the module imports it
    if not check:
        for path, data in changes.items():
            replace(path, data)
    return bool(changes)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--site")
    options = parser.parse_args()
    try:
        folder, version = find_triton(options.site)
        changed = apply(folder, version, options.check)
    except (DoesNotFit, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if changed and options.check:
        print(
            f"error: Triton {version} in {folder} has no rank-0-only cache writer; run python patches/apply.py",
            file=sys.stderr,
        )
        return 1
    how = (
        "always in use"
        if version == PATCHED_VERSION
        else f"in use with TRITON_CACHE_MANAGER={MANAGER}"
    )
    print(
        f"Triton {version}: rank-0-only cache writer {'put in place' if changed else 'already in place'}, {how}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
