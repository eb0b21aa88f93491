"""Keeps what Spark writes to stderr apart from what we write there.

The JVM, Spark's own Python and its workers write a lot: on start, and pages for one broken connection. What matters
comes to the driver as an exception. The rest is logged at level debug, and explains a Spark that does not start.
"""

import logging
import os
import re
import sys
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

logger = logging.getLogger("postdate.pipeline")

_LAST_LINES = 8  # enough to tell what went wrong
_LEFT_S = 0.2  # for what is in the pipe at the end
_OF_A_STACK = re.compile(r"\s|Traceback |Caused by: |WARNING: |$")  # the sentence stands on another line


@contextmanager
def divert_stderr() -> Iterator[deque[str]]:
    """Logs at debug what this process and those that it starts write to stderr; the log itself goes where it went.
    Gives the last lines, without those of stacks.
    """
    last: deque[str] = deque(maxlen=_LAST_LINES)
    sys.stderr.flush()
    with os.fdopen(os.dup(2), "w", encoding="utf-8", errors="backslashreplace") as own:
        reader = _start_reader(last)
        handlers = _move_handlers(sys.stderr, own)
        try:
            yield last
        finally:
            sys.stderr.flush()
            os.dup2(own.fileno(), 2)
            reader.join(_LEFT_S)  # not for ever: a process that we started may keep the pipe open
            for handler in handlers:
                handler.setStream(sys.stderr)


def _start_reader(last: "deque[str]") -> threading.Thread:
    """Puts a pipe in the place of stderr, and a thread at its other end."""
    reading, writing = os.pipe()
    os.dup2(writing, 2)
    os.close(writing)
    reader = threading.Thread(target=_read, args=(reading, last), name="stderr", daemon=True)
    reader.start()
    return reader


def _read(reading: int, last: "deque[str]") -> None:
    with os.fdopen(reading, encoding="utf-8", errors="replace") as lines:
        for line in lines:
            logger.debug("spark: %s", line.rstrip())
            if not _OF_A_STACK.match(line):
                last.append(line.strip())


def _move_handlers(source: TextIO, target: TextIO) -> "list[logging.StreamHandler[TextIO]]":
    """Moves the log's handlers from one stream to another, and returns them."""
    every = logging.getLogger().handlers
    found = [each for each in every if isinstance(each, logging.StreamHandler) and each.stream is source]
    for handler in found:
        handler.setStream(target)
    return found
