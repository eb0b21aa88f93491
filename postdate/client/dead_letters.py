"""Dead letters: messages that a group gave up on, to be looked at, resent or deleted."""

import asyncio
import json
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime

from postdate.client.address import Address
from postdate.client.admin import connect_first
from postdate.client.connection import Connections
from postdate.client.errors import expect_success
from postdate.client.outgoing import Receipt
from postdate.client.producer import Producer
from postdate.client.received import decompress
from postdate.errors import ProtocolError, UsageError
from postdate.message import (
    DELAY_PROPERTIES,
    INTERNAL_PROPERTIES,
    ONCE_PROPERTIES,
    PROPERTY_KEYS,
    PROPERTY_ORIGIN,
    PROPERTY_ORIGIN_MESSAGE_ID,
    PROPERTY_REASON,
    PROPERTY_RETRY_TOPIC,
    PROPERTY_TAGS,
    PROPERTY_UNIQ_KEY,
    check_group,
    decode_properties,
    first_key,
)
from postdate.spans import instant, instant_ms
from postdate.wire import bodies, codes
from postdate.wire.ids import message_id
from postdate.wire.records import Record, decode_records
from postdate.wire.requests import Request

LIMIT_DEFAULT = 1_000
_AT_ONCE = 100  # letters that are resent or deleted between two requests that mark them as done
_SYS_FLAG_KEPT = codes.SYS_COMPRESSED | 7 << 8  # how the body is compressed
# What a retry has added to a message. RocketMQ's own brokers and clients write the last ones.
_NOT_RESENT = frozenset({
    PROPERTY_RETRY_TOPIC, PROPERTY_ORIGIN_MESSAGE_ID, PROPERTY_REASON, PROPERTY_ORIGIN, *DELAY_PROPERTIES,
    *INTERNAL_PROPERTIES, *ONCE_PROPERTIES, "RECONSUME_TIME", "MAX_RECONSUME_TIMES", "CONSUME_START_TIME",
    "DLQ_ORIGIN_TOPIC", "DLQ_ORIGIN_MESSAGE_ID", "MIN_OFFSET", "MAX_OFFSET",
})  # fmt: skip


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """A message that a group gave up on."""

    group: str
    topic: str  # the one that it was sent to; empty if nobody knows
    id: str
    body: bytes
    properties: dict[str, str]
    reason: str  # why it failed last; empty if nobody said
    attempts: int  # how often the group tried
    origin: str  # where it came from, as topic/queue/offset; empty if nobody knows
    dead_at: datetime
    queue_id: int  # its place in the topic %DLQ%<group>
    queue_offset: int
    record: Record  # as it came

    @property
    def key(self) -> str | None:
        return first_key(self.properties.get(PROPERTY_KEYS, "")) or None

    @property
    def keys(self) -> list[str]:
        return self.properties.get(PROPERTY_KEYS, "").split()

    @property
    def tag(self) -> str | None:
        return self.properties.get(PROPERTY_TAGS)


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which letters are meant; each condition may be left out."""

    topic: str | None = None
    key: str | None = None
    since: datetime | None = None
    until: datetime | None = None
    reason: str | None = None  # a part of it, in any case

    def check(self) -> None:
        for at in (self.since, self.until):
            if at is not None:
                instant_ms(at)  # raises UsageError without a time zone

    def fits(self, letter: DeadLetter) -> bool:
        return (
            self.topic in (None, letter.topic)
            and (self.key is None or self.key in letter.keys)
            and (self.since is None or letter.dead_at >= self.since)
            and (self.until is None or letter.dead_at < self.until)
            and (self.reason is None or self.reason.lower() in letter.reason.lower())
        )


class DeadLetters:
    """The dead letters of a client's broker, over its connections."""

    def __init__(
        self, connections: Connections, addresses: tuple[Address, ...], producer: Producer, timeout: float
    ) -> None:
        self._connections, self._addresses = connections, addresses
        self._producer, self._timeout = producer, timeout

    async def find(self, group: str, wanted: Wanted, limit: int | None) -> list[DeadLetter]:
        """The open letters that are wanted, oldest first in each queue."""
        check_group(group)
        wanted.check()
        found: list[DeadLetter] = []
        queue_id = offset = 0
        while queue_id >= 0 and (limit is None or len(found) < limit):
            connection = await connect_first(self._connections, self._addresses, self._timeout)
            fields = {"consumerGroup": group, "queueId": queue_id, "offset": offset}
            answer = await connection.request(Request.GET_DEAD_LETTERS, fields, timeout=self._timeout)
            expect_success(answer)
            letters = (_read_letter(group, record) for record in decode_records(answer.body))
            found += [letter for letter in letters if wanted.fits(letter)]
            try:
                queue_id, offset = int(answer.fields["nextQueueId"]), int(answer.fields["nextOffset"])
            except (KeyError, ValueError) as error:
                raise ProtocolError(f"an answer about dead letters does not say where to go on: {error}") from error
        return found[:limit]

    async def resend(self, letters: Iterable[DeadLetter]) -> list[Receipt]:
        """Sends letters to the topics that they came from; each is done with when it is stored there."""
        chosen = list(letters)
        for letter in chosen:
            _check(letter)
            if not letter.topic:
                raise UsageError(
                    f"nobody knows which topic dead letter {letter.id} was sent to: send its body yourself"
                )
        receipts: list[Receipt] = []
        for start in range(0, len(chosen), _AT_ONCE):
            some = chosen[start : start + _AT_ONCE]
            answers = await asyncio.gather(*map(self._send, some), return_exceptions=True)
            sent = [letter for letter, answer in zip(some, answers, strict=True) if isinstance(answer, Receipt)]
            await self.delete(sent)
            for answer in answers:
                if isinstance(answer, BaseException):
                    raise answer
                receipts.append(answer)
        return receipts

    async def _send(self, letter: DeadLetter) -> Receipt:
        properties = {name: value for name, value in letter.properties.items() if name not in _NOT_RESENT}
        properties[PROPERTY_UNIQ_KEY] = letter.id
        record = letter.record
        sys_flag = record.sys_flag & _SYS_FLAG_KEPT
        return await self._producer.send_letter(letter.topic, record.body, properties, sys_flag, record.stored_at_ms)

    async def delete(self, letters: Iterable[DeadLetter]) -> int:
        """Marks letters as done; returns how many of them were open."""
        by_group: dict[str, list[DeadLetter]] = {}
        for letter in letters:
            _check(letter)
            by_group.setdefault(letter.group, []).append(letter)
        count = 0
        for group, some in by_group.items():
            for start in range(0, len(some), _AT_ONCE):
                places = [[letter.queue_id, letter.queue_offset] for letter in some[start : start + _AT_ONCE]]
                body = json.dumps({"group": group, "letters": places}).encode()
                connection = await connect_first(self._connections, self._addresses, self._timeout)
                answer = await connection.request(Request.FINISH_DEAD_LETTERS, {}, body, timeout=self._timeout)
                count += int(bodies.load(expect_success(answer).body, "what was done with dead letters")["done"])
        return count


def _check(letter: object) -> None:
    if not isinstance(letter, DeadLetter):
        raise UsageError(f"a dead letter is of type {type(letter).__name__}, expected one that dead_letters() returned")


def _read_letter(group: str, record: Record) -> DeadLetter:
    properties = decode_properties(record.properties)
    try:
        body = decompress(record.body, record.sys_flag)
    except ProtocolError:  # compressed in a way that we cannot read
        body = record.body
    return DeadLetter(
        group, properties.get(PROPERTY_RETRY_TOPIC) or properties.get("DLQ_ORIGIN_TOPIC", ""),
        properties.get(PROPERTY_UNIQ_KEY) or message_id(record.store_host, record.offset), body, properties,
        properties.get(PROPERTY_REASON, ""), record.reconsume_times, properties.get(PROPERTY_ORIGIN, ""),
        instant(record.stored_at_ms), record.queue_id, record.queue_offset, record,
    )  # fmt: skip
