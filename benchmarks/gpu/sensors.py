"""Reads the clock, the power and the temperature of the GPU while it works."""

import statistics
import subprocess
import tempfile
from contextlib import AbstractContextManager
from typing import Any

COMMAND = "exec nvidia-smi --query-gpu=clocks.sm,power.draw,temperature.gpu --format=csv,noheader --loop=1"


class Sensors(AbstractContextManager):
    """Runs nvidia-smi during the block, and collects one reading per second. Without nvidia-smi, there are no readings."""

    def __enter__(self) -> "Sensors":
        self.file = tempfile.TemporaryFile("w+")
        self.process = subprocess.Popen(
            COMMAND, shell=True, stdout=self.file, stderr=subprocess.DEVNULL
        )
        return self

    def __exit__(self, *error: Any) -> None:
        self.process.kill()
        self.process.wait()

    def medians(self, seconds: float) -> str:
        """Returns the medians of the readings in the last seconds of the block, such as "1755 MHz, 690.12 W, 71"."""
        self.file.seek(0)
        lines = self.file.read().splitlines()[-max(1, round(seconds)) :]
        columns = zip(*[line.split(", ") for line in lines])
        return ", ".join(statistics.median_low(column) for column in columns)
