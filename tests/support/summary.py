"""Prints the summary of tests/run.sh and .ci/run: a table of the parts, the slowest tests, the skipped tests with their
reasons, and a line with the totals.

    python3 tests/support/summary.py FOLDER [--may-be-empty] cpu/tests cpu/kernels torch2.2/tests

A part is one call of pytest. A part leaves two files in the folder: `cpu-tests.xml`, which pytest writes (--junitxml),
and `cpu-tests.end` with the exit status of pytest, its duration and its budget in seconds. If a part could not start,
`cpu-tests.skipped` contains the reason. A part without these files was killed, and counts as a failure. A part without
tests is a failure, too; with --may-be-empty, for arguments such as `-k tied`, only all parts together need a test.
"""

import os
import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from xml.etree import ElementTree

SLOWEST = 10
# Exit statuses of pytest. It is interrupted by Ctrl-C, by a file that can't be collected, or because of an option (-x).
EMPTY = 5
ENDS = {2: "it was interrupted", EMPTY: "it ran no test"}
# The machine of CI (CI=true) has everything that these tests need, so a skipped test is a failure there.
MUST_RUN_ON_CI = [
    "cpu: tests/container/",
    "cpu: tests/launch/",
    "cpu: kernels",
    "torch2.2: ",
]
# The machine of CI skips tests for these reasons, too: the pinned stack lacks features of newer ones, and an image is built
# only if its files have changed.
MAY_BE_SKIPPED_ON_CI = [
    "the same files as in the last real build",
    "torch 2.2's operator takes no bounds of tensors without content",
    "transformers 4 has no Qwen3.5",
]


@dataclass
class Part:
    """The result of one call of pytest."""

    stack: str
    name: str
    seconds: int = 0
    budget: int = 0  # time limit in seconds on two idle cores
    passed: int = 0
    failed: list[str] = field(default_factory=list)  # a line for each failed test
    skipped: list[str] = field(default_factory=list)  # the file and the reason of each skipped test
    times: list[tuple[float, str]] = field(default_factory=list)  # (seconds, name) of each test

    def skip(self, test: str, reason: str) -> None:
        reason = " ".join(reason.split())
        line = f"{self.stack}: {test}: {reason}"
        must_run = any(line.startswith(start) for start in MUST_RUN_ON_CI)
        may_be_skipped = any(words in line for words in MAY_BE_SKIPPED_ON_CI)
        if os.environ.get("CI") == "true" and must_run and not may_be_skipped:
            self.failed.append(f"{line} (skipped, which is a failure on CI)")
        else:
            file = test.partition("::")[0]
            self.skipped.append(f"{self.stack}: {file}: {reason}")

    def count(self, case: ElementTree.Element) -> None:
        """Counts a test of pytest's XML file. A module that can't be collected is listed in this file like a test."""
        test = f"{case.get('file', '')}::{case.get('name')}"
        self.times.append((float(case.get("time", 0)), f"{self.stack}: {test}"))
        skip = case.find("skipped")
        if case.find("failure") is not None or case.find("error") is not None:
            self.failed.append(f"{self.stack}: {test}")
        elif skip is not None:
            reason = skip.get("message") or "it is expected to fail"
            if reason == "collection skipped":
                reason = skip.text
            self.skip(test, reason)
        else:
            self.passed += 1

    def end(self, status: int, may_be_empty: bool) -> None:
        """Adds a failure for an exit status of pytest that is not caused by a failed test."""
        is_told = self.failed or (status == EMPTY and may_be_empty)
        if status and not is_told:
            reason = ENDS.get(status, f"pytest ended with status {status}")
            self.failed.append(f"{self.stack}: {self.name}: {reason}")


def read_part(folder: Path, place: str, may_be_empty: bool) -> Part:
    stack, name = place.split("/")
    part = Part(stack, name)
    stem = folder / f"{stack}-{name}"
    absence = stem.with_name(f"{stem.name}.skipped")
    if absence.exists():
        part.skip(name, absence.read_text())
        return part
    try:
        end = stem.with_name(f"{stem.name}.end").read_text()
        status, part.seconds, part.budget = map(int, end.split())
        tree = ElementTree.parse(stem.with_name(f"{stem.name}.xml"))
    except (FileNotFoundError, ElementTree.ParseError):
        part.failed.append(f"{stack}: {name}: it did not run to its end")
        return part
    for case in tree.iter("testcase"):
        part.count(case)
    part.end(status, may_be_empty)
    return part


def summarize(parts: list[Part]) -> int:
    """Prints the summary, and returns the exit status."""
    row = "{:9} {:9} {:>7} {:>7} {:>8} {:>8} {:>8}"
    print()
    print(row.format("part", "stack", "passed", "failed", "skipped", "seconds", "budget"))
    for part in parts:
        counts = (part.passed, len(part.failed), len(part.skipped))
        print(row.format(part.name, part.stack, *counts, part.seconds, part.budget))
    for seconds, test in sorted([time for part in parts for time in part.times])[-SLOWEST:]:
        print(f"slow    {seconds:4.0f} s  {test}")
    for part in parts:
        if part.seconds > part.budget:
            print(f"over its budget  {part.stack}: {part.name}: {part.seconds} s of {part.budget}")
    skipped = [line for part in parts for line in part.skipped]
    failed = [line for part in parts for line in part.failed]
    passed = sum(part.passed for part in parts)
    for line, times in Counter(skipped).items():
        print(f"skipped  {times} x {line}")
    for line in failed:
        print(f"failed  {line}")
    ran_nothing = passed + len(failed) + len(skipped) == 0
    if ran_nothing:
        print("no test fits these words")
    print(
        f"\n{passed} passed, {len(failed)} failed, {len(skipped)} skipped in {sum(part.seconds for part in parts)} s"
    )
    if ran_nothing:
        return EMPTY
    return int(len(failed) > 0)


if __name__ == "__main__":
    words = sys.argv[1:]
    may_be_empty = "--may-be-empty" in words
    folder, *places = [word for word in words if word != "--may-be-empty"]
    sys.exit(summarize([read_part(Path(folder), place, may_be_empty) for place in places]))
