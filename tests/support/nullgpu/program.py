"""Runs one of the project's programs on the null device, with the numbers that its decisions need:
python -m tests.support.nullgpu.program training.py [--SETTING=VALUE ...]"""

import runpy
import sys

from tests.support.nullgpu import numbers

if __name__ == "__main__":
    del sys.argv[0]
    with numbers.replaced():
        runpy.run_path(sys.argv[0], run_name="__main__")
