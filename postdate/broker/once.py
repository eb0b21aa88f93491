"""Once: is a message with an id stored already, and what was its producer answered?

A send with an id is looked for in what is written and not applied yet (`Writer.pending_once`), then in the fold's table
(state/once.py), whose hits the record decides. A message that is found is the answer, whatever has become of it: it may
have been cancelled, moved or delivered. Another body under the same id is a mistake of the producer. A message that is
not found gets its window from the settings, as a property: from then on the window stands in the log.
"""

from typing import NamedTuple

from postdate.broker.settings import CurrentSettings
from postdate.broker.writing import Ticket, Writer
from postdate.errors import FlowControl, IllegalMessage, PostdateError
from postdate.keys import once_hash, once_name
from postdate.message import (
    PROPERTY_ONCE,
    PROPERTY_ONCE_MS,
    PROPERTY_UNIQ_KEY,
    Message,
    decode_properties,
)
from postdate.spans import instant
from postdate.state.fold import Fold
from postdate.state.once import StoredOnce
from postdate.state.topics import Topic
from postdate.storage import record as records


class FirstSend(NamedTuple):
    """What the first send of an id was answered."""

    topic: str
    queue_id: int
    unique_key: str
    due_at_ms: int  # 0 where it did not wait
    offset: int  # of its record in the log
    queue_offset: int  # -1 where it waited


class SentBefore(PostdateError):
    """Nobody's fault: a message is stored under this id, or will be when a batch is applied. Not an error of its send,
    but its answer: `first` or, where it is not durable yet, the ticket that has it and its place there.
    """

    def __init__(self, first: FirstSend | None, ticket: Ticket | None = None, index: int = 0) -> None:
        super().__init__("a message is stored under this id")
        self._first, self.ticket, self._index = first, ticket, index

    @property
    def first(self) -> FirstSend:
        """The answer of the first send; its ticket must have one."""
        if self._first is not None:
            return self._first
        ticket, index = self.ticket, self._index
        assert ticket is not None, "either the first send is known or its ticket"
        assert ticket.answers is not None, "the batch is not durable yet"
        entry, offset, queue_offset = ticket.prepared[index], ticket.offsets[index], ticket.answers[index]
        topic, queue_id = entry.message.topic, entry.message.queue_id
        return FirstSend(topic, queue_id, entry.unique_key or "", entry.due_at_ms, offset, queue_offset)


class OnceCalls:
    """Looks ids up for sends."""

    def __init__(self, fold: Fold, writer: Writer, settings: CurrentSettings) -> None:
        self._fold, self._writer, self._settings = fold, writer, settings
        self._id_characters_max = settings.limits.key_characters_max
        self._properties_bytes_max = settings.limits.properties_bytes_max
        self._window_ms, self._encoded = 0, b""  # the window that was used last, and its property

    def take(self, message: Message, id: str, topic: Topic, at_ms: int) -> tuple[bytes, str, int]:
        """Returns the properties of a message with its window, what it is known by, and the hash of that. Raises
        SentBefore where a message of its id and body is stored or written, IllegalMessage for another body, or where
        the id is too long.
        """
        name, limit = once_name(topic.name, id), self._id_characters_max
        if len(id) > limit:
            raise IllegalMessage(f"key_characters_max: {PROPERTY_ONCE} has {len(id)} characters, the limit is {limit}")
        ticket = self._writer.pending_once.get(name)
        if ticket is not None:
            index = ticket.once[name]
            self._compare(ticket.prepared[index].message.body, message.body, id, topic.name, at_ms)
            raise SentBefore(None, ticket, index)
        hashed = once_hash(name)
        for row in self._fold.once.find(hashed):
            if row.until_ms > at_ms and row.offset >= topic.born:
                self._refuse_repeated(row, message, id, topic.name)
        window_ms, properties, limit = self._settings.now.once_window_ms, message.properties, self._properties_bytes_max
        if self._window_ms != window_ms:
            self._window_ms, self._encoded = window_ms, f"{PROPERTY_ONCE_MS}\x01{window_ms}\x02".encode()
        properties += self._encoded if properties.endswith(b"\x02") else b"\x02" + self._encoded
        if len(properties) > limit:
            raise IllegalMessage(
                f"properties have {len(properties)} bytes with {PROPERTY_ONCE_MS}, which the broker adds, "
                f"the limit is {limit}"
            )
        return properties, name, hashed

    def _refuse_repeated(self, row: StoredOnce, message: Message, id: str, topic: str) -> None:
        """Raises if the row is of this topic and id: equal hashes are only a hint."""
        record = records.decode(self._fold.read(row.offset, row.size))
        properties = decode_properties(record.properties)
        if record.topic != topic or properties.get(PROPERTY_ONCE) != id:
            return
        self._compare(record.body, message.body, id, topic, record.stored_at_ms)
        unique_key = properties.get(PROPERTY_UNIQ_KEY, "")
        raise SentBefore(FirstSend(topic, record.queue_id, unique_key, row.due_at_ms, row.offset, row.queue_offset))

    def _compare(self, first: bytes, body: bytes, id: str, topic: str, since_ms: int) -> None:
        if first != body:
            since = instant(since_ms).isoformat(timespec="milliseconds")
            raise IllegalMessage(
                f"once {id[:64]!r}: topic {topic!r} has another body under this id since {since}; send the same body "
                "to get the receipt of that message, or send this one under an id of its own"
            )

    def admit(self, count: int, at_ms: int) -> None:
        """Checks that there is room for more ids. What is over leaves with the batch. Raises FlowControl."""
        kept, limit = self._fold.once.count, self._settings.now.once_ids_max
        excess = kept + len(self._writer.pending_once) + count - limit
        if excess > 0 and not self._fold.once.is_passed(excess, at_ms):
            raise FlowControl(
                f"once_ids_max: {kept} ids are within their window, the limit is {limit}; try later or without once"
            )
