"""A pseudo-terminal for tests: what a program shows there, and what becomes of it when the terminal closes."""

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

END = "\0"  # of what was written before it; shows as nothing


class Terminal:
    """A window of `columns` x 24. It reads all the time, as a window does."""

    def __init__(self, columns=80):
        self.master, self.slave = pty.openpty()
        fcntl.ioctl(self.slave, termios.TIOCSWINSZ, struct.pack("4H", 24, columns, 0, 0))
        self.screen, self.asked, self.closing = "", 0, threading.Event()
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def stream(self):
        """The terminal as a file of this process."""
        return os.fdopen(os.dup(self.slave), "w")

    def start(self, command, **options):
        """A Popen of a command whose controlling terminal this is; it gets the signals of keys and of closing."""
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
        """What was written until now."""
        self.asked += 1
        os.write(self.slave, END.encode())
        while self.screen.count(END) < self.asked:
            assert self.reader.is_alive()
            time.sleep(0.005)
        return self.screen.replace(END, "")

    def close(self):
        """Closes the window. Twice does no harm."""
        if not self.closing.is_set():
            self.closing.set()
            self.reader.join()
            os.close(self.slave)
            os.close(self.master)

    def _read(self):
        decoder = codecs.getincrementaldecoder("utf-8")()  # a read may end within a character
        while not self.closing.is_set():
            if select.select([self.master], [], [], 0.05)[0]:
                self.screen += decoder.decode(os.read(self.master, 65536))


def drawings(text):
    """Every drawing of a row by itself: `\\r` and line ends part them. Blank ones, which wipe a row, are left out."""
    return [row.rstrip() for row in re.split(r"[\r\n]+", text) if row.strip()]
