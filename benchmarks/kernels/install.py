"""Installs versions of Triton from PyPI, each in its own cache folder outside of the project and its environments.

    python -m benchmarks.kernels.install [3.9.0]     installs a version if necessary, and prints its folder for PYTHONPATH

All versions are used to compile kernels. INTERPRETER also runs kernels on a CPU with its interpreter (tests/kernels).
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

INTERPRETER = "3.9.0"
TRITONS = {
    "2.2.0": (80, 86, 89, 90),
    "3.6.0": (80, 86, 89, 90, 100, 120),
    INTERPRETER: (80, 86, 89, 90, 100, 120),
}
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mamba_fsdp-tests"


def installed(name: str, *requirements: str) -> Path:
    """Installs packages without their dependencies into the folder `name` of the cache, unless it exists. Returns the folder.

    Raises OSError with a reason of one line if pip can't install them.
    """
    folder = CACHE / f"{name}-py{sys.version_info[0]}{sys.version_info[1]}"
    if folder.exists():
        return folder
    CACHE.mkdir(parents=True, exist_ok=True)
    fresh = Path(tempfile.mkdtemp(dir=CACHE))
    pip = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--target",
        fresh,
        *requirements,
    ]
    done = subprocess.run(pip, capture_output=True, text=True)
    if done.returncode:
        fresh.rmdir()
        reason = (done.stderr.strip() or "no reason given").splitlines()[-1]
        raise OSError(f"{name} can't be installed here: {reason}")
    try:
        fresh.rename(folder)
    except OSError:
        assert folder.exists(), f"can't rename {fresh} to {folder}"  # another process has made it
    return folder


def triton_folder(version: str = INTERPRETER) -> Path:
    return installed(f"triton-{version}", f"triton=={version}")


if __name__ == "__main__":
    try:
        print(triton_folder(*sys.argv[1:]))
    except OSError as why:
        sys.exit(f"error: {why}")
