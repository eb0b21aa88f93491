"""Log lines of long-running commands."""

import logging
import sys

from postdate.cli import logs
from tests.support.core import T0


def test_an_event_of_the_log_is_one_line_without_a_traceback() -> None:
    try:
        raise ValueError("two\nlines")
    except ValueError:
        record = logging.LogRecord("x", logging.WARNING, "", 0, "it %s", ("failed",), sys.exc_info())
    record.created = T0 / 1_000
    assert logs.Lines().format(record) == "2023-11-14T22:13:20.000Z warning  it failed: ValueError: two lines"
