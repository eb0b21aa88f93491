"""Moving a group to another place in its topics."""

from collections.abc import Mapping
from datetime import datetime
from typing import Any, Literal, NamedTuple

from postdate.client.address import Address
from postdate.client.admin import connect_first
from postdate.client.connection import Connections
from postdate.client.errors import expect_success
from postdate.errors import ProtocolError, UsageError
from postdate.message import RETRY_TOPIC_PREFIX, check_group
from postdate.spans import instant_ms
from postdate.wire import bodies
from postdate.wire.frame import Command
from postdate.wire.requests import Request

ResetTo = Literal["earliest", "latest"] | datetime | int

_LATEST = -1  # as a timestamp; the earliest message became visible after 0


class QueueReset(NamedTuple):
    """Where a group was in a queue, and where a reset moves it."""

    topic: str
    queue_id: int
    before: int | None  # None: it had not begun
    after: int
    in_work: int  # messages that the group has, or waits to try again: they stay with it

    @property
    def again(self) -> int:
        """How many messages the group gets a second time."""
        return max((self.before or 0) - self.after, 0)

    @property
    def skipped(self) -> int:
        """How many messages the group does not get. A group that has not begun would begin at the first one there."""
        return 0 if self.before is None else max(self.after - self.before, 0)


class Resets:
    """The resets of a client, over its connections."""

    def __init__(self, connections: Connections, addresses: tuple[Address, ...], timeout: float) -> None:
        self._connections, self._addresses, self._timeout = connections, addresses, timeout

    async def reset(self, group: str, to: ResetTo, topic: str | None, *, dry_run: bool) -> list[QueueReset]:
        check_group(group)
        at_ms = _timestamp(to)
        topics = [topic] if topic is not None else await self._topics(group)
        if not topics:
            raise UsageError(f"group {group} has not read any topic yet; name one")
        found: list[QueueReset] = []
        for name in topics:
            fields = {
                "group": group, "topic": name, "timestamp": at_ms, "isForce": "true",
                "dryRun": "true" if dry_run else "false",
            }  # fmt: skip
            answer = await self._ask(Request.INVOKE_BROKER_TO_RESET_OFFSET, fields)
            found += [
                _read_move(name, move) for move in bodies.load_by_queue(answer.body, "a reset").get("moves") or ()
            ]
        return sorted(found, key=lambda queue: (queue.topic, queue.queue_id))

    async def _topics(self, group: str) -> list[str]:
        """The topics that a group has read, without its own retry topic."""
        answer = await self._ask(Request.GET_CONSUME_STATS, {"consumerGroup": group})
        queues = bodies.decode_by_queue(answer.body, "offsetTable")
        return sorted({queue.topic for queue in queues if not queue.topic.startswith(RETRY_TOPIC_PREFIX)})

    async def _ask(self, code: int, fields: Mapping[str, object]) -> Command:
        connection = await connect_first(self._connections, self._addresses, self._timeout)
        return expect_success(await connection.request(code, fields, timeout=self._timeout))


def _read_move(topic: str, move: Any) -> QueueReset:
    try:
        return QueueReset(topic, move["queueId"], move["before"], move["after"], move["leased"])
    except (KeyError, TypeError) as error:
        raise ProtocolError(f"the answer to a reset cannot be read: {type(error).__name__} {error}") from error


def _timestamp(to: ResetTo) -> int:
    if to == "earliest":
        return 0
    if to == "latest":
        return _LATEST
    if isinstance(to, datetime):
        return max(instant_ms(to), 0)
    if isinstance(to, int) and not isinstance(to, bool) and to >= 0:
        return to
    raise UsageError(f"to is {to!r}, expected 'earliest', 'latest', a datetime or epoch milliseconds")
