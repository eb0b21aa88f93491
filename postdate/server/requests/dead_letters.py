"""Dead letters, for operators: which are open, and that some are done with."""

from collections.abc import Mapping
from typing import Any

import orjson

from postdate.broker.broker import Broker
from postdate.broker.dead_letters import DONE_GROUP
from postdate.clock import Clock
from postdate.errors import GroupNotFound, UsageError
from postdate.message import DLQ_TOPIC_PREFIX, check_group
from postdate.server.answers import when_settled
from postdate.server.connection import Connection
from postdate.server.pulse import Pulse
from postdate.storage import record as records
from postdate.wire import bodies, codes
from postdate.wire.frame import Command, reply

_LETTERS_PER_ANSWER = 256  # looked at, about a millisecond; the client asks on
_PLACES_MAX = 1_000  # of one request


class DeadLetters:
    """Answers questions about dead letters."""

    def __init__(self, broker: Broker, clock: Clock, pulse: Pulse) -> None:
        self._broker, self._clock, self._pulse = broker, clock, pulse

    def list_open(self, connection: Connection, command: Command, asked: Mapping[str, Any]) -> bytes:
        """Answers the records of open letters from a place on, and the place to go on from; none after the last."""
        group, queue_id, offset = asked["consumerGroup"], asked["queueId"], asked["offset"]
        topic = DLQ_TOPIC_PREFIX + group
        known = self._broker.view.find_topic(topic)
        if known is None:
            self._check_group(group)
            return reply(command, codes.SUCCESS, {"nextQueueId": -1, "nextOffset": -1})
        letters, stop = self._broker.dead_letters.open_letters(group, queue_id, offset, _LETTERS_PER_ANSWER)
        body = bytearray()
        for letter in letters:
            if body and len(body) + letter.size > self._broker.settings.pull_bytes_max:
                stop = letter.offset
                break
            data = self._broker.read_record(letter.place)
            if not data:  # retention has removed it
                continue
            at = len(body)
            body += data
            visible_at_ms = self._broker.view.visible_at_ms(topic, queue_id, letter.offset)
            records.deliver(body, [(at, letter.offset, letter.place, visible_at_ms)], connection.broker_host)
        _, high = self._broker.offsets(topic, queue_id)
        following = (queue_id, stop) if stop < high else (queue_id + 1, 0)
        if following[0] >= len(known.numbers):
            following = (-1, -1)
        fields = {"nextQueueId": following[0], "nextOffset": following[1]}
        return reply(command, codes.SUCCESS, fields, body=bytes(body))

    def finish(self, connection: Connection, command: Command, _: Mapping[str, Any]) -> bytes | None:
        """Marks letters as done; answers how many of them were open."""
        asked = bodies.load(command.body, "dead letters")
        group, places = asked.get("group"), asked.get("letters")
        if not isinstance(group, str) or not isinstance(places, list) or not 1 <= len(places) <= _PLACES_MAX:
            raise UsageError(f"expected a group and 1 to {_PLACES_MAX} letters")
        check_group(group)
        if not all(isinstance(place, list) and [type(part) for part in place] == [int, int] for place in places):
            raise UsageError("a letter is a queue id and an offset")
        count, ticket = self._broker.dead_letters.finish(
            group, [(queue_id, offset) for queue_id, offset in places], self._clock.now_ms()
        )
        asked_by = command.without_content()
        body = orjson.dumps({"done": count})
        if ticket is None:
            return reply(asked_by, codes.SUCCESS, body=body)
        answer = when_settled(connection, asked_by, lambda _: reply(asked_by, codes.SUCCESS, body=body))
        self._pulse.expect(connection, ticket, answer)
        return None

    def _check_group(self, group: str) -> None:
        check_group(group)
        if not self._broker.view.has_group(group) and group != DONE_GROUP:
            raise GroupNotFound(f"group {group!r} does not exist")
