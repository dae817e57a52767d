"""Provides a pseudo-terminal, for tests of a program's output and of its reaction to a closing terminal."""

import codecs
import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import termios
import threading
import time

END = "\0"  # marks the end of earlier output; a terminal does not show it


class Terminal:
    """A window of `columns` x 24 characters. Like a real window, the terminal reads the output all the time."""

    def __init__(self, columns=80):
        self.master, self.slave = pty.openpty()
        fcntl.ioctl(self.slave, termios.TIOCSWINSZ, struct.pack("4H", 24, columns, 0, 0))
        self.screen, self.asked, self.closing = "", 0, threading.Event()
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def stream(self):
        """Returns the terminal as a file of this process."""
        return os.fdopen(os.dup(self.slave), "w")

    def start(self, command, **options):
        """Starts a command with this controlling terminal. Returns the Popen.

        The terminal sends signals to the command for keys such as Ctrl-C, and when it is closed.
        """
        take = (
            "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); "
            "os.execvp(sys.argv[1], sys.argv[1:])"
        )
        return subprocess.Popen(
            ["python3", "-c", take, *command],
            stdin=self.slave,
            stdout=self.slave,
            stderr=self.slave,
            start_new_session=True,
            **options,
        )

    def type(self, text):
        os.write(self.master, text.encode())

    def text(self):
        """Returns the output until now."""
        self.asked += 1
        os.write(self.slave, END.encode())
        while self.screen.count(END) < self.asked:
            assert self.reader.is_alive()
            time.sleep(0.005)
        return self.screen.replace(END, "")

    def close(self):
        """Closes the window. Closing it again has no effect."""
        if not self.closing.is_set():
            self.closing.set()
            self.reader.join()
            os.close(self.slave)
            os.close(self.master)

    def _read(self):
        # A read can end inside a multi-byte character.
        decoder = codecs.getincrementaldecoder("utf-8")()
        while not self.closing.is_set():
            if select.select([self.master], [], [], 0.05)[0]:
                self.screen += decoder.decode(os.read(self.master, 65536))


def drawings(text):
    """Splits the output into the successive contents of a row. Each content ends with `\\r` or a line end. Blank
    contents are omitted."""
    return [row.rstrip() for row in re.split(r"[\r\n]+", text) if row.strip()]
