"""A command of ours on a terminal of a given size, for tests of what people see."""

import codecs
import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
from pathlib import Path
from typing import Self

WAIT_S = 30.0
ROOT = Path(__file__).parents[2]
_ESCAPE = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")


def plain(text: str) -> str:
    """What is seen: the text without colours and moves of the cursor."""
    return _ESCAPE.sub("", text).replace("\r", "")


class Terminal:
    """Runs `postdate` with stdin, stdout and stderr on a terminal."""

    def __init__(self, *words: str, columns: int = 80, lines: int = 50, term: str = "xterm-256color") -> None:
        self._outside, inside = pty.openpty()
        fcntl.ioctl(inside, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
        environ = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "postdate", *words], stdin=inside, stdout=inside, stderr=inside,
            env={**environ, "PYTHONPATH": str(ROOT), "TERM": term}, start_new_session=True,
        )  # fmt: skip
        os.close(inside)
        self._text = ""
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")  # an interrupt may cut a write

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait(WAIT_S)
        os.close(self._outside)

    def read_until(self, mark: str) -> str:
        """Reads up to the mark and returns what stood before it and the mark itself."""
        while mark not in self._text:
            more = self._read()
            assert more, f"{mark!r} did not come, but: {self._text[-2_000:]}"
            self._text += more
        before, _, self._text = self._text.partition(mark)
        return before + mark

    def read_all(self) -> str:
        """Reads until the command has ended."""
        while more := self._read():
            self._text += more
        self._process.wait(WAIT_S)
        return self._text

    def _read(self) -> str:
        assert select.select([self._outside], [], [], WAIT_S)[0], f"nothing came behind {self._text[-2_000:]}"
        try:
            return self._decoder.decode(os.read(self._outside, 65_536))  # a read may end inside a character
        except OSError:  # the other end is closed
            return ""

    def interrupt(self) -> None:
        self._process.send_signal(signal.SIGINT)

    def wait(self) -> int:
        return self._process.wait(WAIT_S)
