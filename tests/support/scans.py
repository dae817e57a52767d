"""Compiles the kernels of the scan for rows that are divided and have documents, with the Triton on the path.

    python -m tests.support.scans CC D_STATE

Prints a JSON line for each launch, see benchmarks/kernels/compiler.py.
"""

import json
import sys
from dataclasses import asdict
from unittest import mock

import triton

from benchmarks.kernels import launches
from benchmarks.kernels.compiler import compile_one
from mamba_fsdp.ops import triton as glue


def main(cc, d_state):
    config = {"layers": "mamba1", "d_model": 96, "n_layer": 1, "d_state": d_state}
    is_version_2 = triton.__version__.startswith("2.")
    with (
        mock.patch.object(glue, "is_version_2", lambda: is_version_2),
        mock.patch.object(launches, "MODELS", ("a small one",)),
        mock.patch.object(launches, "preset", lambda _: config),
        mock.patch.object(launches, "CASES", launches.CASES[1:]),
    ):
        for launch in launches.launches_on(cc):
            if launch.operator == "scan":
                print(json.dumps(asdict(compile_one(launch, cc))), flush=True)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
