"""The helpers that run ranks are those of the sharding's tests."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
