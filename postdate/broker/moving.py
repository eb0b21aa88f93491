"""Moves, as calls: a message that waits gets another due, later or earlier, or comes at once.

    prepare    makes the message of a move from the record that was found: the same, with its new due
    move       writes moves as one batch; the answer of each says whether its message still waited

Who calls has looked the messages up, in the log (lookup.py) or in the table. What is found there may be gone when the
record is applied: the fold decides (state/moves.py).
"""

from collections.abc import Sequence
from typing import NamedTuple

from postdate.broker.lookup import Found
from postdate.broker.sending import SendCalls
from postdate.broker.settings import CurrentSettings
from postdate.broker.writing import Ticket, Writer
from postdate.errors import FlowControl, IllegalMessage, UsageError
from postdate.keys import key_hash
from postdate.message import (
    DELAY_PROPERTIES,
    ONCE_PROPERTIES,
    PROPERTY_KEYS,
    PROPERTY_MOVED,
    PROPERTY_TIMER_DELIVER_MS,
    PROPERTY_UNIQ_KEY,
    Message,
    MovedFrom,
    decode_properties,
    encode_properties,
    first_key,
)
from postdate.state.fold import NOT_MOVED, Fold
from postdate.storage import record as records
from postdate.storage.batch import Prepared

_CHANGED = DELAY_PROPERTIES | ONCE_PROPERTIES  # its id stays with the record that was sent


class Source(NamedTuple):
    """A message that waits, as it was found, and its new due; 0 or an instant that has passed means at once."""

    record: bytes
    found: MovedFrom
    due_at_ms: int


class MoveTicket(Ticket):
    """The receipt of some moves; each answer is whether its message was moved."""

    __slots__ = ()

    def settle(self, answers: list[int]) -> None:
        self.answers = [answer != NOT_MOVED for answer in answers]


class MoveCalls:
    """Moves messages that wait."""

    def __init__(self, fold: Fold, writer: Writer, sending: SendCalls, settings: CurrentSettings) -> None:
        self._fold, self._writer, self._sending, self._settings = fold, writer, sending, settings

    def move(self, sources: Sequence[Source], at_ms: int) -> Ticket:
        """Moves messages, in one batch. Each answer is whether the message still waited: if not, nothing has changed.

        Raises UsageError, IllegalMessage, TopicNotFound, FlowControl, DiskFull, LogFailed.
        """
        waiting, limit = self._fold.cancels.count, self._settings.now.tombstones_max
        if waiting + len(sources) > limit:
            raise FlowControl(
                f"tombstones_max: {waiting} cancels and moves wait for their messages, the limit is {limit}"
            )
        prepared = [self._prepare(source, at_ms) for source in sources]
        return self._sending.write_moved(prepared, at_ms, MoveTicket())

    def check(self, sources: Sequence[Source], at_ms: int) -> None:
        """Raises what `move` would raise because of these messages or their dues."""
        for source in sources:
            self._prepare(source, at_ms)

    @property
    def count(self) -> int:
        """How many messages were ever moved."""
        return self._fold.moves.count

    def is_waiting(self, data: bytes, found: MovedFrom) -> bool:
        """Whether the message of a record still waits where it was found, or has come into the wheel since."""
        row = self._row_of(data, found)
        return row is not None and self._fold.moves.waits(found, *row)

    def is_cancelled(self, data: bytes, found: MovedFrom, *, in_table: bool) -> bool:
        """Whether a cancel has taken the message of a record from the table before it was due. `in_table`: the table
        says so; else it may not have read the cancel yet. Of what is due nobody says it: it may have been delivered
        before the cancel came.
        """
        if found.due_at_ms <= self._fold.fired_at_ms:
            return False
        row = self._row_of(data, found)
        return row is not None and self._fold.moves.is_cancelled(found, *row, in_table=in_table)

    def _row_of(self, data: bytes, found: MovedFrom) -> tuple[int, int, int] | None:
        """Returns queue number and hashes of a record's message; None where its topic was deleted since."""
        record = records.decode(data)
        topic = self._fold.topics.by_name.get(record.topic)
        if topic is None or found.arrival < topic.born:
            return None
        properties = decode_properties(record.properties)
        hashes = key_hash(properties.get(PROPERTY_UNIQ_KEY, "")), key_hash(first_key(properties.get(PROPERTY_KEYS, "")))
        return topic.numbers[record.queue_id % len(topic.numbers)], *hashes

    def is_in_wheel(self, data: bytes, found: MovedFrom) -> bool:
        """Whether the message of a record waits in the wheel."""
        return self._fold.moves.is_in_wheel(found, key_hash(records.properties_of(data).get(PROPERTY_UNIQ_KEY, "")))

    def is_named_by(self, found: Found, unique_key: str, due_at_ms: int) -> bool:
        """Whether a handle of this unique key and due is one of a message: the due may be one that it had before it was
        moved.
        """
        if due_at_ms == found.due_at_ms or PROPERTY_MOVED in records.properties_of(found.record):
            return True
        topic = records.topic_of(found.record)
        return found.due_at_ms in self._fold.jobs.moved_dues(topic, unique_key, due_at_ms)

    def _prepare(self, source: Source, at_ms: int) -> Prepared:
        record = records.decode(source.record)
        properties = decode_properties(record.properties)
        if not properties.get(PROPERTY_UNIQ_KEY):
            raise UsageError(
                "the message has no unique key (UNIQ_KEY), and nothing else names it alone: it cannot be moved"
            )
        kept = {name: value for name, value in properties.items() if name not in _CHANGED}
        due_at_ms = source.due_at_ms if source.due_at_ms > at_ms else at_ms
        changed = {PROPERTY_TIMER_DELIVER_MS: str(due_at_ms), PROPERTY_MOVED: str(source.found)}
        message = Message(
            record.topic, record.body, encode_properties(kept | changed), record.queue_id, record.flag,
            record.sys_flag, record.born_at_ms, record.born_host, record.reconsume_times, record.prepared_offset,
        )  # fmt: skip
        try:
            return self._sending.prepare_moved(message, at_ms)
        except IllegalMessage as error:
            raise UsageError(f"the message cannot be moved: {error}") from error
