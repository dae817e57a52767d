"""Runs a rank for tests.storm. The rank can kill itself at a given moment.

    python -m tests.storm.rank KILL ARGUMENTS

KILL is the JSON of a result of Storm.choose_kill, or null.
"""

import json
import os
import signal
import sys
import threading

from mamba_fsdp import command_line
from mamba_fsdp.trainer import loop
from mamba_fsdp.verbs import train


class Death:
    """Kills this rank at the moment that `kill` describes.

    File operations and finished steps are counted from the start of the process. Seconds are counted from the end of
    the first step.
    """

    def __init__(self, kill):
        self.at = kill["at"]
        # Operations or steps until the kill, or seconds from the first step until the kill.
        self.remaining = kill["nth"]
        self.folder = kill["folder"]
        self.lock = threading.Lock()

    def arrange(self):
        if self.at not in ("time", "step"):
            sys.addaudithook(self.notice)
            return
        end = loop.finish_step

        def finish_step(*given):
            if self.at == "step":
                self.count()
            elif self.remaining is not None:
                threading.Timer(self.remaining, self.come).start()
                self.remaining = None
            return end(*given)

        loop.finish_step = finish_step

    def notice(self, event, arguments):
        """Counts an audit event if it is an operation of the kind `at` on a file of the run. The kind "publish"
        consists of operations on published models."""
        is_publish = self.at == "publish"
        wanted = ("open", "os.rename") if is_publish else (self.at,)
        if event not in wanted or not isinstance(arguments[0], (str, bytes)):
            return
        path = os.fsdecode(arguments[0])
        if path.startswith(self.folder) and ("/pth/" in path or not is_publish):
            self.count()

    def count(self):
        with self.lock:
            self.remaining -= 1
            if self.remaining == 0:
                self.come()

    def come(self):
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    kill = json.loads(sys.argv[1])
    if kill and kill["rank"] == int(os.environ["RANK"]):
        Death(kill).arrange()
    command_line.run(train.main, lambda: "", sys.argv[2:])
