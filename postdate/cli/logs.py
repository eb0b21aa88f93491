"""Log lines of a long-running command on stderr, one per event."""

import argparse
import logging
import sys

from postdate.cli.render import moment

_LEVELS = ("debug", "info", "warning", "error")


def add_log_level(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--log-level", choices=_LEVELS, default="info", help="log level, on stderr (default: info)")


def start_logging(level: str, only: str = "") -> None:
    """Starts logging to stderr. `only` names the one logger to hear, where libraries would log what concerns nobody."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(Lines())
    handler.addFilter(logging.Filter(only))
    logging.basicConfig(level=level.upper(), handlers=[handler])


class Lines(logging.Formatter):
    """One line per event, in UTC: 2027-01-01T07:00:00.000Z warning  ... An exception is its last line."""

    def format(self, record: logging.LogRecord) -> str:
        text = record.getMessage()
        if record.exc_info and record.exc_info[1] is not None:
            error = record.exc_info[1]
            text = f"{text}: {type(error).__name__}: {error}"
        at_ms = int(record.created * 1_000)
        return f"{moment(at_ms)} {record.levelname.lower():<7}  {' '.join(text.split())}"
