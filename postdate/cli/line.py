"""A line on the terminal that changes while something takes long. Nobody sees it where output goes to a file."""

import os
import sys
from typing import TextIO


class Line:
    """It has a stderr of its own: while Spark runs, the usual one is aside."""

    def __enter__(self) -> "Line":
        sys.stderr.flush()
        self._out: TextIO = os.fdopen(os.dup(2), "w", encoding="utf-8")
        return self

    def __exit__(self, *_: object) -> None:
        self._wipe()
        self._out.close()

    def say(self, sentence: str) -> None:
        """Stays, also in a file."""
        self._wipe()
        print(sentence, file=self._out, flush=True)

    def show(self, text: str) -> None:
        if self._out.isatty():
            print(f"\r\033[K{text}", end="", file=self._out, flush=True)

    def _wipe(self) -> None:
        if self._out.isatty():
            print("\r\033[K", end="", file=self._out, flush=True)
