"""python -m mamba_fsdp doctor

Check this machine: packages, environment, GPUs, EFA, and the backend of each
operator. Each line has a verdict: `ok`, `FAIL`, or `-` for something that is
absent but not needed. The exit code is 1 if any check fails.
"""

from mamba_fsdp.launch.checks import CHECKS
from mamba_fsdp.reporting.console import Console


def main() -> int:
    """Runs all checks and prints a line for each. Returns the exit code: 1 if any check fails, otherwise 0."""
    failed = False
    for check in CHECKS:
        finding = check.run()
        Console().print_line(f"{finding.verdict:<5}{check.name:<16}{finding.text}")
        failed |= finding.verdict == "FAIL"
    return int(failed)
