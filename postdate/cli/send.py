"""`postdate send`: one message, the same one many times, or a message for each line of stdin."""

import argparse
import dataclasses
import os
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

from postdate.cli.command import OK, add_broker, add_timeout, print_json
from postdate.cli.render import Working, count, rough
from postdate.cli.render import instant as show_instant
from postdate.cli.values import instant as instant_ms
from postdate.cli.values import named_value, positive, span
from postdate.client import Outgoing, Receipt, connect
from postdate.clock import SystemClock
from postdate.errors import PostdateError, UsageError
from postdate.spans import instant

HELP = """\
Sends a message that is delivered at once, after a delay or at a time, and prints how to cancel it.

examples:
  postdate send orders "hello"                                       at once
  postdate send orders "hello" --delay 30m                           also 500ms, 10s, 2h, 7d, 1h30m
  postdate send orders "hello" --at 2027-01-01T08:00:00+01:00        without a zone it is local time
  postdate send orders "hello" --level 3                             RocketMQ's delay level: 10 s
  postdate send orders --file order.json --key order-17 --tag paid
  postdate send orders - < order.json                                the body is stdin
  postdate send orders "hello" --once order-17                       again with the same id: stored once
  seq 1000 | postdate send orders --lines --delay 1h --json          a message for each line that is not empty

exit codes: 0 sent, 1 there is no such topic and the broker makes none by itself, 2 wrong usage or the file cannot be
read, 3 no broker was reached or it refused, 130 interrupted
"""

_STDIN = "-"
_BATCH_MESSAGES = 1_000
_READ_BYTES = 1 << 16
_LINE_BYTES_MAX = 64 << 20  # no broker takes a longer body, so it is not gathered in memory either
_QUIET_NS = 300_000_000  # work that takes no longer shows no progress


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("topic", metavar="TOPIC", help="topic of the message")
    parser.add_argument("body", metavar="BODY", nargs="?", help="the body as text, or - for stdin")
    parser.add_argument("--file", metavar="F", help="a file with the body; - is stdin")
    parser.add_argument("--lines", action="store_true", help="each line of stdin is a message")
    when = parser.add_mutually_exclusive_group()
    when.add_argument("--delay", metavar="SPAN", type=span, help="deliver it this much later")
    when.add_argument("--at", metavar="TIME", type=instant_ms, help="deliver it then: ISO 8601 or epoch milliseconds")
    when.add_argument("--level", metavar="N", type=positive, help="deliver it after RocketMQ's delay level N")
    parser.add_argument(
        "--key", metavar="K", action="append", help="a key to find or cancel it by, without spaces; may be repeated"
    )
    parser.add_argument("--tag", metavar="T", help="a tag that consumers may filter by")
    parser.add_argument(
        "--property", metavar="NAME=VALUE", type=named_value, action="append", default=[], help="may be repeated"
    )
    parser.add_argument(
        "--once", metavar="ID", help="store one message of this id and body; sent again, the first receipt is printed"
    )
    parser.add_argument("--count", metavar="N", type=positive, default=1, help="send it this many times")
    add_timeout(parser)
    add_broker(parser, _send)


def _send(arguments: argparse.Namespace) -> int:
    if (arguments.body is not None) + (arguments.file is not None) + arguments.lines != 1:
        raise UsageError("give the body in one way: BODY, --file or --lines")
    if arguments.once is not None and (arguments.lines or arguments.count > 1):
        raise UsageError("--once is the id of one message: leave out --lines and --count")
    if arguments.lines:
        return _send_many(arguments, _line_batches())
    body = _body(arguments)
    if arguments.count > 1:
        starts = range(0, arguments.count, _BATCH_MESSAGES)
        return _send_many(arguments, ([body] * min(_BATCH_MESSAGES, arguments.count - start) for start in starts))
    with connect(arguments.addr, timeout=arguments.timeout / 1_000) as client:
        receipt = client.send(arguments.topic, body, **_wishes(arguments))
    if arguments.json:
        _print_json([receipt])
    else:
        place = "" if receipt.queue_offset is None else f", offset {receipt.queue_offset}"
        print(f"sent {receipt.id} to {receipt.topic}, queue {receipt.queue_id}{place}")
        if receipt.due_at_ms is not None:
            left_ms = receipt.due_at_ms - SystemClock().now_ms()
            left = f"in {rough(left_ms)}" if left_ms > 0 else "which has come"
            print(f"due {show_instant(receipt.due_at_ms)}, {left}")
        if receipt.handle is not None:
            print(f"cancel it with: postdate cancel {receipt.handle}")
    return OK


def _wishes(arguments: argparse.Namespace) -> dict[str, Any]:
    """What the flags say about a message besides its body, as the client takes it."""
    return {
        "delay": None if arguments.delay is None else timedelta(milliseconds=arguments.delay),
        "at": None if arguments.at is None else instant(arguments.at), "level": arguments.level, "key": arguments.key,
        "tag": arguments.tag, "properties": dict(arguments.property), "once": arguments.once,
    }  # fmt: skip


# -- bodies -----------------------------------------------------------------------------------------------------


def _body(arguments: argparse.Namespace) -> bytes:
    if _STDIN in (arguments.body, arguments.file):
        return sys.stdin.buffer.read()
    if arguments.file is not None:
        path = Path(arguments.file)
        try:
            return path.read_bytes()
        except OSError as error:
            raise UsageError(f"{path} cannot be read: {error.strerror}") from error
    return str(arguments.body).encode("utf-8", "surrogateescape")  # as the shell passed it, even if it is no text


def _line_batches() -> Iterator[list[bytes]]:
    """The lines of stdin that are not empty, as many as there are at a time: a slow writer's are not held back."""
    rest, stdin = b"", sys.stdin.fileno()
    while chunk := os.read(stdin, _READ_BYTES):
        *lines, rest = (rest + chunk).split(b"\n")
        yield _full(lines)
        if len(rest) > _LINE_BYTES_MAX:
            raise UsageError(f"a line has more than {_LINE_BYTES_MAX} bytes")
    yield _full([rest])


def _full(lines: list[bytes]) -> list[bytes]:
    return [body for line in lines if (body := line.rstrip(b"\r"))]


# -- many -------------------------------------------------------------------------------------------------------


def _send_many(arguments: argparse.Namespace, batches: Iterator[list[bytes]]) -> int:
    wishes = _wishes(arguments)
    with (
        connect(arguments.addr, timeout=arguments.timeout / 1_000) as client,
        _Tally(0 if arguments.lines else arguments.count) as tally,
    ):
        for bodies in batches:
            try:
                receipts = client.send_batch(arguments.topic, [Outgoing(body, **wishes) for body in bodies])
            except PostdateError as error:
                if not tally.sent:
                    raise
                raise PostdateError(f"{error}; at least {count(tally.sent, 'message')} had been sent before") from error
            tally.add(receipts)
            if arguments.json:
                _print_json(receipts)
    if not arguments.json:
        tally.print(arguments.topic)
    return OK


class _Tally:
    """What was sent so far, and progress on a terminal if it takes a moment. `total` is 0 if nobody knows it."""

    def __init__(self, total: int) -> None:
        self.sent = 0
        self._total = total
        self._dues: list[int] = []  # the first and the last
        self._clock = SystemClock()
        self._started_ns = self._clock.elapsed_ns()
        self._working = Working()

    def __enter__(self) -> "_Tally":
        self._working.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._working.__exit__()

    def add(self, receipts: list[Receipt]) -> None:
        self.sent += len(receipts)
        dues = self._dues + [receipt.due_at_ms for receipt in receipts if receipt.due_at_ms is not None]
        self._dues = [min(dues), max(dues)] if dues else []
        if self._clock.elapsed_ns() - self._started_ns > _QUIET_NS:
            self._working.show("sent", self.sent, self._total)

    def print(self, topic: str) -> None:
        print(f"sent {count(self.sent, 'message')} to {topic}")
        if self._dues:
            first, last = self._dues
            print(
                f"due {show_instant(first)}" if first == last else f"due {show_instant(first)} to {show_instant(last)}"
            )
            print("--json prints their handles, to cancel them with")


# -- receipts ---------------------------------------------------------------------------------------------------


def _print_json(receipts: list[Receipt]) -> None:
    for receipt in receipts:
        print_json(dataclasses.asdict(receipt))
    sys.stdout.flush()
