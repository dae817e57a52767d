"""Tritons for the tests, each in a cache folder of its own outside the project: none is a part of the CPU stack.

    python tests/kernels/triton_install.py [VERSION]     prints its folder, for PYTHONPATH; installs it on first use

The newest runs kernels in its interpreter; all compile them (test_compiled.py).
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

INTERPRETER = "3.9.0"
VERSIONS = ("2.2.0", "3.6.0", INTERPRETER)
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mamba_fsdp-tests"


def triton_folder(version=INTERPRETER):
    """Raises OSError with the reason in a line where it can't be installed."""
    folder = CACHE / f"triton-{version}-py{sys.version_info[0]}{sys.version_info[1]}"
    if folder.exists():
        return folder
    CACHE.mkdir(parents=True, exist_ok=True)
    fresh = Path(tempfile.mkdtemp(dir=CACHE))
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", fresh, f"triton=={version}"]
    done = subprocess.run(pip, capture_output=True, text=True)
    if done.returncode:
        fresh.rmdir()
        reason = (done.stderr.strip() or "no reason given").splitlines()[-1]
        raise OSError(f"Triton {version} can't be installed here: {reason}")
    try:
        fresh.rename(folder)
    except OSError:
        assert folder.exists(), f"can't rename {fresh} to {folder}"  # another test run was faster
    return folder


if __name__ == "__main__":
    try:
        print(triton_folder(*sys.argv[1:]))
    except OSError as why:
        sys.exit(str(why))
