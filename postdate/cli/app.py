"""Parses the words of a command line and runs the command.

A command is a module of this folder with a text HELP (a description, then examples and exit codes) and a function
`add`, which adds flags to the command's parser and sets what it runs. Only the module of the command in the words is
imported: `send` does not wait for what `check` needs. A mistake of the user, the disk or the broker is one sentence on
stderr, never a traceback.
"""

import argparse
import importlib
import os
import sys
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING

from postdate import __version__
from postdate.cli.command import INTERRUPTED, NEGATIVE, OK, USAGE, describe
from postdate.errors import GroupNotFound, PostdateError, TopicNotFound, UsageError

if TYPE_CHECKING:
    from postdate.config import Limits  # loading the settings takes as long as sending a message

COMMANDS = {
    "up": "start a broker",
    "send": "send a message, now or for later",
    "consume": "print the messages of a topic as they come",
    "import": "schedule the rows of files, millions of them",
    "cancel": "cancel waiting messages, by handle, key or predicate",
    "postpone": "deliver waiting messages later or earlier",
    "deliver": "deliver waiting messages now",
    "jobs": "show imports, cancels and postponements in bulk",
    "pending": "count waiting messages by topic and by time",
    "forecast": "draw the messages due ahead as bars",
    "sql": "query all waiting messages with Spark SQL",
    "status": "show the state of broker and pipeline",
    "find": "find messages by key, and say where they are",
    "transaction": "list, show, commit and roll back open transactions",
    "topic": "list, show, create, update and delete topics",
    "group": "list, show, create, reset and delete consumer groups",
    "user": "make the first user, and manage all others",
    "acl": "manage what users may do",
    "audit": "show who changed what, and who was refused",
    "dead": "list, show, resend and delete dead letters",
    "pipeline": "run a pipeline on this machine or on a cluster",
    "bulk": "serve a broker's data folder over Arrow Flight",
    "table": "adopt a table whose data folder is lost",
    "backup": "copy a data folder while its broker runs",
    "check": "verify a closed data folder",
    "log": "print the log of a data folder",
    "settings": "print the settings of a broker, or a file to start from",
    "completion": "print a script that completes commands in a shell",
}

HELP = """\
A message broker for messages that must arrive later.

examples:
  postdate up
  postdate send orders "hello" --delay 30m
  postdate consume orders --group billing
  postdate pending
  postdate status
  postdate check ./postdate-data

exit codes: 0 done, 1 a negative answer (damage was found, nothing was cancelled, there is no such topic or group), 2
wrong usage, or a file, folder or port that cannot be used, 3 no broker was reached or it refused, 130 interrupted
"""


def main(argv: Sequence[str] | None = None, *, limits: "Limits | None" = None) -> int:
    """Runs one command and returns its exit code. Wrong usage ends in SystemExit(2), as argparse does it.

    `limits` are those of a broker that the command starts.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    arguments = build_parser([words[0]] if words else []).parse_args(words, argparse.Namespace(limits=limits))
    run: Callable[[argparse.Namespace], int] = arguments.run
    try:
        code = run(arguments)
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader of our output has seen enough. Python must not try to flush the rest when it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return OK
    except KeyboardInterrupt:
        return INTERRUPTED
    except (TopicNotFound, GroupNotFound) as error:
        _complain(error)
        return NEGATIVE
    except UsageError as error:
        _complain(error)
        return USAGE
    except (PostdateError, OSError) as error:
        _complain(error)
        return int(arguments.failed)
    return code


def _complain(error: Exception) -> None:
    text = str(error)
    if isinstance(error, OSError) and error.filename and error.strerror:
        text = f"{error.filename}: {error.strerror}"
    print(f"postdate: {' '.join(text.split())}", file=sys.stderr)


def build_parser(complete: Collection[str]) -> argparse.ArgumentParser:
    """The parser with the flags of some commands; of the others it has only the names."""
    parser = argparse.ArgumentParser(prog="postdate", allow_abbrev=False)
    describe(parser, HELP)
    parser.add_argument("--version", action="version", version=f"postdate {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name, summary in COMMANDS.items():
        command = commands.add_parser(name, help=summary, allow_abbrev=False)
        if name in complete:
            module = importlib.import_module(f"postdate.cli.{name}")
            describe(command, module.HELP)
            module.add(command)
    return parser
