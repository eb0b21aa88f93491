"""Sending: a producer's message is validated and prepared, admitted, and written with its batch.

Preparing finds out everything about a message that the fold will want to know; nothing is written yet, so a message
that is refused changes nothing. Admission is flow control. storage/batch.py makes the bytes, when the place of the
batch in the log is known. This is the hot path of sending: a topic is looked up once.
"""

from collections.abc import Mapping
from typing import NamedTuple, NoReturn

from postdate.broker.once import OnceCalls
from postdate.broker.settings import CurrentSettings
from postdate.broker.writing import NO_NAMES, NO_SECONDS, Names, Seconds, Ticket, Writer
from postdate.errors import FlowControl, IllegalMessage, NoPermission
from postdate.keys import key_hash
from postdate.message import (
    INTERNAL_PROPERTIES,
    PROPERTY_KEYS,
    PROPERTY_ONCE,
    PROPERTY_TAGS,
    PROPERTY_TIMER_DEL_UNIQKEY,
    PROPERTY_TRANSACTION,
    PROPERTY_UNIQ_KEY,
    SYS_HALF,
    TRIES_MAX,
    DelayLevels,
    Host,
    Message,
    check_message,
    decode_properties,
    due_and_level,
    first_key,
    has_other_keys,
    refuse_internal,
    tag_hash,
)
from postdate.state.fold import Fold
from postdate.state.topics import PERM_WRITE, RESERVED_TOPICS, Topic
from postdate.storage import record as records
from postdate.storage.batch import COMMIT, MORE_KEYS, MOVE, SYSTEM_TOPIC_PREFIX, Prepared

_NEW = tuple.__new__  # past the constructor of a named tuple, which costs as much as the checks
_NOT_FROM_PRODUCERS = INTERNAL_PROPERTIES | {PROPERTY_TIMER_DEL_UNIQKEY, PROPERTY_TRANSACTION}
_UNUSUAL = _NOT_FROM_PRODUCERS | {PROPERTY_ONCE}  # most messages have none of them, and pay for one comparison


class _Known(NamedTuple):
    """A topic that was looked up, and the shape of its records by length of the born host's address."""

    topic: Topic
    shapes: dict[int, records.Shape]


class SendCalls:
    """Prepares messages and writes them."""

    def __init__(self, fold: Fold, writer: Writer, settings: CurrentSettings, store_host: Host) -> None:
        self._fold, self._writer, self._settings = fold, writer, settings
        self._properties_bytes_max = settings.limits.properties_bytes_max
        self._store_host = store_host
        self._once = OnceCalls(fold, writer, settings)
        self._has_once = False  # whether a message with an id was ever prepared
        self.levels = DelayLevels.parse(settings.now.message_delay_level)
        self._known: dict[str, _Known] = {}
        self.accepted_count = 0  # messages written since the folder was opened
        self.timed_count = 0  # those of them that had to wait

    # -- preparing ----------------------------------------------------------------------------------------------

    def forget_topics(self) -> None:
        """A topic was put or deleted."""
        self._known.clear()

    def prepare(self, message: Message, at_ms: int) -> Prepared:
        """The first half of a send, for a caller who gathers a batch one message after the other: checks a message and
        finds out when it is due. Changes nothing. Raises IllegalMessage, TopicNotFound, NoPermission; SentBefore for
        one that is stored once, and is stored.
        """
        # Unpacked once: this runs for every send, and reading attributes costs more than the checks.
        name, body, encoded_properties, queue_id, _, sys_flag, _, born_host, tries, _ = message
        known = self._known.get(name)
        topic, shapes = known if known is not None else self._look_up(name)
        shape = shapes.get(len(born_host.address))
        settings = self._settings.now
        if (
            len(body) > settings.body_bytes_max
            or len(encoded_properties) > self._properties_bytes_max
            or not 0 <= queue_id < topic.write_queue_count
            or shape is None
            or not 0 <= tries <= TRIES_MAX
            or sys_flag & SYS_HALF
        ):
            self._refuse_fields(message, topic)
        properties, once, once_hash = decode_properties(encoded_properties), "", 0
        if not _UNUSUAL.isdisjoint(properties):
            if not _NOT_FROM_PRODUCERS.isdisjoint(properties):
                _refuse(properties)
            if PROPERTY_ONCE in properties:
                encoded_properties, once, once_hash = self._once.take(message, properties[PROPERTY_ONCE], topic, at_ms)
                message, self._has_once = _NEW(Message, (name, body, encoded_properties, *message[3:])), True
        due_at_ms, level = due_and_level(properties, at_ms, self.levels, settings.delay_ms_max)
        get = properties.get
        unique, keys, tags = get(PROPERTY_UNIQ_KEY), get(PROPERTY_KEYS), get(PROPERTY_TAGS)
        first, flags = keys, 0
        if keys and " " in keys:
            first, flags = first_key(keys), MORE_KEYS if has_other_keys(keys) else 0
        return _NEW(
            Prepared,
            (
                message, shape, shape.fixed_bytes + len(body) + len(encoded_properties), level, topic.numbers[queue_id],
                due_at_ms, key_hash(unique) if unique else 0, key_hash(first) if first else 0,
                tag_hash(tags) if tags else 0, unique, flags, once, once_hash,
            ),
        )  # fmt: skip

    def _refuse_fields(self, message: Message, topic: Topic) -> NoReturn:
        check_message(message, self._settings.now.body_bytes_max, self._properties_bytes_max)
        if message.sys_flag & SYS_HALF:
            raise IllegalMessage(
                f"sys_flag {message.sys_flag} marks the half of a transaction, and the property {PROPERTY_TRANSACTION} "
                "is not true"
            )
        raise IllegalMessage(
            f"queue {message.queue_id} of topic {topic.name!r} does not exist: it has {topic.write_queue_count}"
        )

    def _look_up(self, name: str) -> "_Known":
        refuse_system_topic(name)
        topic = self._fold.topics.get(name)
        if not topic.perm & PERM_WRITE:
            raise NoPermission(f"topic {name!r} may not be written: its perm is {topic.perm}")
        shapes = {length: records.shape(Host(bytes(length), 0), self._store_host, name.encode()) for length in (4, 16)}
        known = self._known[name] = _Known(topic, shapes)
        return known

    # -- writing ------------------------------------------------------------------------------------------------

    def write(self, prepared: list[Prepared], at_ms: int) -> Ticket:
        """The second half of a send: writes one batch, at the instant for which its messages were prepared. No topic
        may have changed in between. Raises IllegalMessage, FlowControl, DiskFull, LogFailed.
        """
        timed = len([None for entry in prepared if entry.due_at_ms])
        seconds = self._admit(prepared, timed) if timed else NO_SECONDS
        once = self._admit_once(prepared, at_ms) if self._has_once else NO_NAMES
        ticket = self._writer.write(prepared, at_ms, timed, seconds, once=once)
        self.accepted_count += len(prepared)
        self.timed_count += timed
        return ticket

    def _admit_once(self, prepared: list[Prepared], at_ms: int) -> Names:
        """Returns the messages of a batch that are stored once: their place by what they are known by. Raises
        FlowControl, and IllegalMessage where two of them have one id.
        """
        places = [index for index, entry in enumerate(prepared) if entry.once_hash]
        if not places:
            return NO_NAMES
        once = {prepared[index].once: index for index in places}
        if len(once) < len(places):
            raise IllegalMessage(f"two messages of a batch have one {PROPERTY_ONCE}: send them one after the other")
        assert self._writer.pending_once.keys().isdisjoint(once), "another one was written since this one was prepared"
        self._once.admit(len(once), at_ms)
        return once

    def prepare_moved(self, message: Message, at_ms: int) -> Prepared:
        """As `prepare`, for a message that was stored before: its queue may be gone since."""
        topic, _ = self._known.get(message.topic) or self._look_up(message.topic)
        return self.prepare(message._replace(queue_id=message.queue_id % topic.write_queue_count), at_ms)

    def write_moved(self, prepared: list[Prepared], at_ms: int, ticket: Ticket) -> Ticket:
        """As `write`, for messages that were stored before and are moved."""
        timed = len([None for entry in prepared if entry.due_at_ms])
        seconds = self._admit(prepared, timed) if timed else NO_SECONDS
        return self._writer.write(prepared, at_ms, timed, seconds, MOVE, ticket)

    def write_committed(self, prepared: Prepared, at_ms: int, ticket: Ticket) -> None:
        """As `write`, for the message that a commit brings."""
        timed = 1 if prepared.due_at_ms else 0
        seconds = self._admit([prepared], timed) if timed else NO_SECONDS
        self._writer.write([prepared], at_ms, timed, seconds, COMMIT, ticket)
        self.accepted_count += 1
        self.timed_count += timed

    def _admit(self, prepared: list[Prepared], timed: int) -> Seconds:
        """Checks that messages which will wait fit the bounds of the wheel, which is in RAM, and of each second.
        Returns how many are due in which second, where seconds are limited. Raises FlowControl.
        """
        settings = self._settings.now
        waiting, limit = self._fold.wheel.count, settings.wheel_entries_max
        if waiting + self._writer.pending_timed + timed > limit:
            raise FlowControl(f"wheel_entries_max: {waiting} messages are due soon, the limit is {limit}; try later")
        limit = settings.due_second_messages_max
        if not limit:
            return NO_SECONDS
        asked: Seconds = {}
        for entry in prepared:
            if entry.due_at_ms:
                place = (entry.due_at_ms // 1_000, entry.message.topic)
                asked[place] = asked.get(place, 0) + 1
        for (second, name), count in asked.items():
            waiting = self._fold.quotas.count(second, name) + self._writer.pending_seconds.get((second, name), 0)
            if waiting + count > limit:
                raise FlowControl(
                    f"due_second_messages_max: topic {name!r} has {waiting} messages due in second {second}, "
                    f"the limit is {limit}; choose another due time"
                )
        return asked


def refuse_system_topic(name: str) -> None:
    if name in RESERVED_TOPICS or name.startswith(SYSTEM_TOPIC_PREFIX):
        raise NoPermission(f"topic {name!r} belongs to the broker")


def _refuse(properties: Mapping[str, str]) -> None:
    refuse_internal(properties)
    if PROPERTY_TIMER_DEL_UNIQKEY in properties:
        raise IllegalMessage(f"{PROPERTY_TIMER_DEL_UNIQKEY} marks a cancel, not a message: use cancel")
    if properties[PROPERTY_TRANSACTION].lower() == "true":
        raise IllegalMessage(f"{PROPERTY_TRANSACTION}=true marks the half of a transaction, not a message")
