"""Tests of Triton kernels on a CPU. tests/run.sh runs them in a second call: TRITON_INTERPRET=1 with a Triton on the
path (triton_install.py) must be in the environment before anything imports it; elsewhere they are not collected."""

import os
from importlib import util

if os.environ.get("TRITON_INTERPRET") != "1" or util.find_spec("triton") is None:
    collect_ignore_glob = ["test_*.py"]
