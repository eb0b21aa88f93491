"""`postdate consume`: prints messages as they come, one line each."""

import argparse
import asyncio
import sys
from datetime import timedelta
from typing import Any

from postdate.cli.command import NEGATIVE, OK, add_broker, print_json
from postdate.cli.render import body as show_body
from postdate.cli.render import body_fields, moment, span
from postdate.cli.values import positive
from postdate.cli.values import span as span_ms
from postdate.client import AsyncReceivedMessage, connect_async
from postdate.client.signals import stop_on_signals
from postdate.errors import ProtocolError
from postdate.message import DELAY_PROPERTIES
from postdate.spans import instant_ms

HELP = """\
Prints the messages of a topic as a member of a consumer group. It acknowledges each one that it prints.

examples:
  postdate consume orders --group billing                            until Ctrl-C
  postdate consume orders --group billing --tag "paid || refunded"
  postdate consume orders --group new --from last                    a new group begins after the last message
  postdate consume orders --group billing --count 10 --timeout 30s   ten, or until none has come for 30 s
  postdate consume orders --group billing --json | jq -r .body

A line has the time when the message became visible, its place, how late it was, and its body. A message that was sent
with a delay does not carry its due time, so its line shows the time since it was sent.

SIGTERM ends it as the timeout does: what it has printed does not come again.

exit codes: 0 got what was asked for, 1 the timeout came before --count messages, or before any, 2 wrong usage, 3 no
broker was reached or it refused, 130 interrupted
"""


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("topic", metavar="TOPIC", help="what to read")
    parser.add_argument("--group", metavar="G", required=True, help="the consumer group to read as")
    parser.add_argument("--tag", metavar="T", default="*", help='only these tags, such as "paid || refunded"')
    parser.add_argument(
        "--from", dest="start", choices=("first", "last"), default="first", help="where a new group begins"
    )
    parser.add_argument("--count", metavar="N", type=positive, help="end after this many messages")
    parser.add_argument("--timeout", metavar="SPAN", type=span_ms, help="end when none has come for this long")
    add_broker(parser, lambda arguments: asyncio.run(_receive(arguments)))


async def _receive(arguments: argparse.Namespace) -> int:
    """Prints until there are enough, or none has come for too long."""
    loop, printed = asyncio.get_running_loop(), 0
    idle = None if arguments.timeout is None else timedelta(milliseconds=max(arguments.timeout, 1))
    async with connect_async(arguments.addr) as client:
        messages = client.consume(arguments.topic, arguments.group, tag=arguments.tag, from_=arguments.start, idle=idle)
        if sys.stderr.isatty():
            print(f"messages of {arguments.topic} as group {arguments.group}; Ctrl-C ends", file=sys.stderr)
        with stop_on_signals(lambda: loop.call_soon_threadsafe(client.stop_taking)):
            async for message in messages:
                body = _body(message)
                if arguments.json:
                    print_json(_as_json(message, body))
                else:
                    print(_line(message, body))
                sys.stdout.flush()  # it is acknowledged next, so it must be out
                printed += 1
                if printed == arguments.count:
                    await message.acknowledge()  # no next one is asked for
                    break
    return OK if printed >= (arguments.count or 1) else NEGATIVE


def _body(message: AsyncReceivedMessage) -> bytes:
    """The body; as it came where we cannot decompress it, because one message must not stop all."""
    try:
        return message.body
    except ProtocolError as error:
        print(f"postdate: {message.id}: {error}", file=sys.stderr)
        return message.raw_body


def _line(message: AsyncReceivedMessage, content: bytes) -> str:
    parts = [
        moment(instant_ms(message.stored_at)),
        f"{message.topic}/{message.queue_id}",
        f"offset {message.queue_offset}",
    ]
    named = {"key": message.key, "tag": message.tag, "attempt": message.attempt if message.attempt > 1 else None}
    parts += [f"{name} {value}" for name, value in named.items() if value is not None]
    return "  ".join([*parts, *_lateness(message), show_body(content, whole=True)])


def _lateness(message: AsyncReceivedMessage) -> list[str]:
    stored_at_ms = instant_ms(message.stored_at)
    if message.due_at is not None:
        return [f"{span(stored_at_ms - instant_ms(message.due_at))} after due"]
    if DELAY_PROPERTIES.isdisjoint(message.properties):
        return []
    # Two clocks, the producer's and the broker's: the difference may be a little below the delay.
    return [f"{span(max(0, stored_at_ms - instant_ms(message.born_at)))} after sending"]


def _as_json(message: AsyncReceivedMessage, content: bytes) -> dict[str, Any]:
    shown = {
        "topic": message.topic, "queue_id": message.queue_id, "queue_offset": message.queue_offset, "id": message.id,
        "offset_id": message.offset_id, "key": message.key, "tag": message.tag, "attempt": message.attempt,
        "born_at_ms": instant_ms(message.born_at), "stored_at_ms": instant_ms(message.stored_at),
        "due_at_ms": None if message.due_at is None else instant_ms(message.due_at), "properties": message.properties,
    }  # fmt: skip
    return shown | body_fields(content)
