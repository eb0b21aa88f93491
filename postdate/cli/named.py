"""What `cancel`, `postpone` and `deliver` share: the messages that they are about, and what became of each."""

import argparse
from collections.abc import Iterable
from typing import Any

from postdate.cli.command import NEGATIVE, OK, print_json, say_no
from postdate.cli.render import instant
from postdate.client import MovedMessage
from postdate.errors import UsageError
from postdate.message import Moved


def add(parser: argparse.ArgumentParser) -> None:
    """Adds the flags that name one message, or all of a key."""
    parser.add_argument("handle", metavar="HANDLE", nargs="?", help="the handle that send printed")
    parser.add_argument("--topic", metavar="T", help="the topic, without a handle")
    parser.add_argument("--key", metavar="K", help="one of the keys of the messages, or their id")
    parser.add_argument("--only", action="store_true", help="change nothing if several messages of the key wait")


def read(arguments: argparse.Namespace, ways: str) -> dict[str, Any]:
    """Returns the arguments of the client's call, by name. Raises UsageError, which names the `ways` that there are."""
    by_key = {"topic": arguments.topic, "key": arguments.key}
    is_by_key = None not in by_key.values()
    if (not is_by_key) if arguments.handle is None else (by_key != dict.fromkeys(by_key)):
        raise UsageError(f"give either a handle, or --topic and --key{ways}")
    if not is_by_key and arguments.only:
        raise UsageError("--only is for --topic and --key")
    return {**by_key, "only": arguments.only} if is_by_key else {"receipt": arguments.handle}


def say_none(arguments: argparse.Namespace) -> int:
    return say_no(f"no message of topic {arguments.topic!r} has the key {arguments.key!r}")


def print_moved(arguments: argparse.Namespace, answer: MovedMessage | list[MovedMessage]) -> int:
    """Prints what became of messages that were to be moved; returns the exit code."""
    messages: Iterable[MovedMessage] = [answer] if isinstance(answer, MovedMessage) else answer
    if not messages:
        return say_no(f"no message of topic {arguments.topic!r} with the key {arguments.key!r} waits or was delivered")
    for message in messages:
        if arguments.json:
            print_json(message._asdict() | {"outcome": message.outcome.value})
        else:
            print(f"{message.id}  {_fate(message)}" if answer is messages else _fate(message))
    return OK if any(message.outcome is Moved.MOVED for message in messages) else NEGATIVE


def _fate(message: MovedMessage) -> str:
    if message.outcome is Moved.DELIVERED:
        return "delivered: the message was out before"
    if message.outcome is Moved.UNKNOWN:
        return "unknown: no such message waits; nothing was changed"
    if message.handle is None:
        return f"moved: it is out now, and was due {instant(message.was_due_at_ms or 0)}"
    return f"moved: it is due {instant(message.due_at_ms or 0)}, and was due {instant(message.was_due_at_ms or 0)}"
