"""Runs programs on the null device, in processes that are forked from this one after the imports.

    python -m tests.support.nullgpu.forks

Each line of stdin is a JSON list of programs that run at the same time: [[arguments of Python, variables], ...]. When all
of them have ended, or one has failed, a line of stdout contains [exit code, output] of each program. A program that takes
too long prints its stack.
"""

import json
import multiprocessing
import os
import signal
import sys
import time

import tests.support.nullgpu.training  # noqa: F401 - the imports of all programs
from tests.support import forked

MAX_SECONDS = 900  # a program that takes longer is considered to hang


def run(programs):
    processes = []
    for words, variables in programs:
        length = 2 if words[0] == "-m" else 1
        environment = os.environ | variables
        processes.append(forked.Training(words[length:], environment, True, words[:length]))
    end = time.monotonic() + MAX_SECONDS
    while any(process.returncode is None for process in processes):
        time.sleep(0.02)
        if any(process.returncode for process in processes) or time.monotonic() > end:
            break
    for process in processes:
        process.send_signal(signal.SIGABRT)
    return [[process.returncode, process.communicate()[0]] for process in processes]


def main():
    forked.PROCESSES = multiprocessing.get_context("fork")
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        print(json.dumps(run(json.loads(line))), file=answers, flush=True)


if __name__ == "__main__":
    main()
