"""python -m mamba_fsdp doctor

What this machine has and whether it works: packages, environment, GPUs, EFA,
the backend that serves each operator. A verdict a line: `ok`, `FAIL`, or `-`
for what is not here and need not be. The exit code is 1 if any fails.
"""

from mamba_fsdp.report.console import Console
from mamba_fsdp.verbs.checks import CHECKS


def main() -> int:
    """Returns 1 where anything fails, else 0."""
    failed = False
    for check in CHECKS:
        finding = check.make()
        Console().line(f"{finding.verdict:<5}{check.name:<16}{finding.text}")
        failed |= finding.verdict == "FAIL"
    return int(failed)
