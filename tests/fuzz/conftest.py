"""The files that are mutated are made as the tests of their readers make them."""

import sys
from pathlib import Path

sys.path[:0] = [
    str(Path(__file__).resolve().parents[1] / folder) for folder in ("data", "interop", "parallel")
]
