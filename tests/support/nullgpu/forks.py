"""Runs programs on the null device in processes that are forked from this one, which has their imports: python -m
tests.support.nullgpu.forks

Each line of stdin is a list of programs, [arguments of Python, variables], that run simultaneously. The answer is a
line with [exit code, output] of each program, written when all have ended or one has failed. A program that takes too
long prints its stack.
"""

import json
import multiprocessing
import os
import signal
import sys
import time

import tests.support.nullgpu.training  # noqa: F401 - what all of them import
from tests.support import forked

MOST_SECONDS = 900  # a program takes a tenth of it, unless it hangs


def run(programs):
    processes = []
    for words, variables in programs:
        length = 2 if words[0] == "-m" else 1
        environment = os.environ | variables
        processes.append(forked.Training(words[length:], environment, True, words[:length]))
    end = time.monotonic() + MOST_SECONDS
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
