"""A message, its properties, and the one decision about it: when is it due?

Everything here is a function of its arguments: no clock, no random number, no file, no socket. Names, limits and hashes
are RocketMQ's, because its clients compute the same ones on their side.

Properties travel and rest encoded, as `name 0x01 value 0x02` repeated, in UTF-8. They are decoded only where a name is
asked for: the broker stores the producer's bytes untouched.
"""

import enum
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache
from typing import NamedTuple

from postdate.errors import IllegalMessage, UsageError
from postdate.spans import span_ms

# Properties that a producer may set.
PROPERTY_DELAY = "DELAY"
PROPERTY_TIMER_DELAY_SEC = "TIMER_DELAY_SEC"
PROPERTY_TIMER_DELAY_MS = "TIMER_DELAY_MS"
PROPERTY_TIMER_DELIVER_MS = "TIMER_DELIVER_MS"
PROPERTY_START_DELIVER_TIME = "__STARTDELIVERTIME"  # the same, as clients of Alibaba Cloud name it
PROPERTY_TIMER_DEL_UNIQKEY = "TIMER_DEL_UNIQKEY"
PROPERTY_UNIQ_KEY = "UNIQ_KEY"
PROPERTY_KEYS = "KEYS"
PROPERTY_TAGS = "TAGS"

# Of a transaction: its half message has the first two and may have the third; the message that its commit brings has
# the last two, which the broker writes.
PROPERTY_TRANSACTION = "TRAN_MSG"  # "true" marks the half
PROPERTY_PRODUCER_GROUP = "PGROUP"  # whose producers are asked what became of it
PROPERTY_CHECK_IMMUNITY = "CHECK_IMMUNITY_TIME_IN_SECONDS"  # how long they are not asked
PROPERTY_TRANSACTION_ID = "__transactionId__"  # UNIQ_KEY
PROPERTY_CHECK_TIMES = "TRANSACTION_CHECK_TIMES"  # how often they were asked

# Ours, of a message that is stored once: the id that its producer gave it, and the window, in ms, in which no other
# message is stored under that id. The broker writes the second one.
PROPERTY_ONCE = "POSTDATE_ONCE"
PROPERTY_ONCE_MS = "POSTDATE_ONCE_MS"
ONCE_WINDOW_BYTES = 16  # at the end of a record: 0x01, at most 14 digits, 0x02

# Properties of a message that a consumer sent back.
PROPERTY_RETRY_TOPIC = "RETRY_TOPIC"  # the topic it was sent to at first
PROPERTY_ORIGIN_MESSAGE_ID = "ORIGIN_MESSAGE_ID"
# Ours, of a message that a group's members could not handle.
PROPERTY_REASON = "POSTDATE_REASON"  # why it failed last
REASON_CHARACTERS_MAX = 1_000  # of that: the broker keeps it in RAM and in every snapshot
PROPERTY_ORIGIN = "POSTDATE_ORIGIN"  # where it came from: topic/queue id/queue offset

# Ours, of a message that was moved to another due time: where it waited before. Producers may send it, as a copy of a
# message that they received does; it means something in the record of a move alone.
PROPERTY_MOVED = "POSTDATE_MOVED"

# Properties that our broker puts behind those of a message that an operator has looked up.
PROPERTY_STATE = "POSTDATE_STATE"  # waiting, visible, ...: see lookup.State
PROPERTY_PLACE = "POSTDATE_PLACE"  # wheel, log or table: where it waits
PROPERTY_DUE_MS = "POSTDATE_DUE_MS"

# Properties that RocketMQ's broker writes for itself. Trusting one from a producer would let it pass by the timer or
# deliver to another topic. The last one is ours.
PROPERTY_TIMER_OUT_MS = "TIMER_OUT_MS"
PROPERTY_TIMER_ENQUEUE_MS = "TIMER_ENQUEUE_MS"
PROPERTY_TIMER_DEQUEUE_MS = "TIMER_DEQUEUE_MS"
PROPERTY_TIMER_ROLL_TIMES = "TIMER_ROLL_TIMES"
PROPERTY_TIMER_ROLL_LABEL = "TIMER_ROLL_LABEL"
PROPERTY_REAL_TOPIC = "REAL_TOPIC"
PROPERTY_REAL_QID = "REAL_QID"
INTERNAL_PROPERTIES = frozenset(
    {PROPERTY_TIMER_OUT_MS, PROPERTY_TIMER_ENQUEUE_MS, PROPERTY_TIMER_DEQUEUE_MS, PROPERTY_TIMER_ROLL_TIMES,
     PROPERTY_TIMER_ROLL_LABEL, PROPERTY_REAL_TOPIC, PROPERTY_REAL_QID, PROPERTY_ONCE_MS}
)  # fmt: skip

# What a copy of a message must not have: under its id, the message itself is stored.
ONCE_PROPERTIES = frozenset({PROPERTY_ONCE, PROPERTY_ONCE_MS})
NOT_OF_COPIES = ONCE_PROPERTIES | {PROPERTY_TRANSACTION}

RETRY_TOPIC_PREFIX = "%RETRY%"
DLQ_TOPIC_PREFIX = "%DLQ%"

TOPIC_CHARACTERS_MAX = 127
# Topics made from a group's name by the broker; clients accept longer names for them.
GROUP_TOPIC_CHARACTERS_MAX = 255
GROUP_CHARACTERS_MAX = 120
BODY_BYTES_MAX_DEFAULT = 4 * 1024 * 1024
# The record holds the length of the properties in a signed 16-bit field.
PROPERTIES_BYTES_MAX = 32767
PORT_MAX = 65535
# How often a message may have been tried: counting on from here must never leave the 32 bits of a record's field.
TRIES_MAX = 1_000_000

DEFAULT_LEVELS_TEXT = "1s 5s 10s 30s 1m 2m 3m 4m 5m 6m 7m 8m 9m 10m 20m 30m 1h 2h"
# 10 years of 365.25 days.
DELAY_MS_MAX_DEFAULT = 315_576_000_000

LEVELS_MAX = 255  # a batch's row has a byte for the level

# Bits of the sys flag that say what a record is in a transaction: RocketMQ's. A half has the first one, the message
# that a commit brings the second one.
SYS_HALF, SYS_COMMITTED = 4, 8

INT32_MIN, INT32_MAX = -(2**31), 2**31 - 1
INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1

# Enough for the names and tags of a busy broker; a tag may have 32 KB, so a full cache of the longest ones has 32 MB.
_NAMES_CACHED_MAX = 4096
_TAGS_CACHED_MAX = 1024
# An error's text travels in a reply's header: a producer's value of 32 KB does not belong there.
_SHOWN_CHARACTERS_MAX = 64


class Host(NamedTuple):
    """An IP address, 4 or 16 bytes, and a port."""

    address: bytes
    port: int


LOOPBACK = Host(b"\x7f\x00\x00\x01", 0)


class Message(NamedTuple):
    """What a producer sent. Nothing is checked on construction: see `check_topic` and `check_message`."""

    topic: str
    body: bytes
    properties: bytes = b""
    queue_id: int = 0
    flag: int = 0
    sys_flag: int = 0
    born_at_ms: int = 0
    born_host: Host = LOOPBACK
    reconsume_times: int = 0
    prepared_offset: int = 0


class SendIdentity(NamedTuple):
    """What a send and its resends have in common, and no other send has.

    The unique key alone is not enough: a message that a consumer sends on to a retry topic keeps the one that it has.
    """

    topic: str
    unique_key: str
    born_at_ms: int
    reconsume_times: int


class Cancelled(enum.Enum):
    """The truth about a cancel."""

    CANCELLED = "cancelled"  # it waited, and will never reach a consumer
    DELIVERED = "delivered"  # it was visible before the cancel came
    UNKNOWN = "unknown"  # no such message was found; should one arrive from the table, it is cancelled


class Moved(enum.Enum):
    """The truth about a move to another due."""

    MOVED = "moved"  # it waited, and waits for its new due now, or is visible
    DELIVERED = "delivered"  # it was visible before the move came
    UNKNOWN = "unknown"  # no such message waits; nothing has changed


class Ended(enum.Enum):
    """The truth about an end of a transaction."""

    COMMITTED = "committed"  # its message is delivered, or waits for its due
    ROLLED_BACK = "rolled_back"  # its message will never be seen
    ALREADY_COMMITTED = "already_committed"  # by an earlier end; nothing has changed
    ALREADY_ROLLED_BACK = "already_rolled_back"  # likewise
    UNKNOWN = "unknown"  # no such half is known, or not any more; nothing has changed


class MovedFrom(NamedTuple):
    """Where a message waited before it was moved, as the property POSTDATE_MOVED of its record says it."""

    due_at_ms: int
    arrival: int
    is_near: bool  # it was found in the wheel, and can be nowhere else

    def __str__(self) -> str:
        return f"{self.due_at_ms} {self.arrival} {int(self.is_near)}"

    @classmethod
    def parse(cls, text: str) -> "MovedFrom | None":
        """Read the property; None for a text that no broker has written."""
        numbers = _MOVED.fullmatch(text)
        return cls(int(numbers[1]), int(numbers[2]), numbers[3] == "1") if numbers else None


_MOVED = re.compile(r"([0-9]{1,19}) ([0-9]{1,19}) ([01])")


# ---------------------------------------------------------------------------------------------------- properties


def encode_properties(properties: Mapping[str, str]) -> bytes:
    """Encode properties so that `decode_properties` gives the same ones back.

    Raises IllegalMessage for what would not come back: an empty name or value (readers drop those), a separator (0x01,
    0x02) within either, or characters that UTF-8 cannot carry. The total size is for `check_message` to judge.
    """
    for name, value in properties.items():
        if not name:
            raise IllegalMessage(f"a property with the value {_quote(value)} has an empty name")
        if not value:
            raise IllegalMessage(f"property {_quote(name)} has an empty value, which readers would drop")
        for part in (name, value):
            if "\x01" in part or "\x02" in part:
                raise IllegalMessage(f"property {_quote(name)} contains a separator, 0x01 or 0x02: {_quote(part)}")
    text = "".join([f"{name}\x01{value}\x02" for name, value in properties.items()])
    try:
        return text.encode()
    except UnicodeEncodeError as cause:
        raise IllegalMessage(f"a property cannot be written as UTF-8: {cause.reason} at {cause.start}") from cause


def decode_properties(data: bytes) -> dict[str, str]:
    """Decode properties as leniently as RocketMQ does; on the hot path.

    The last entry may lack its 0x02. An entry without 0x01, without a name or without a value is passed over. Of two
    entries with one name the later counts. Raises IllegalMessage if the bytes are not UTF-8.
    """
    try:
        text = data.decode()
    except UnicodeDecodeError as cause:
        raise IllegalMessage(f"properties are not UTF-8: {cause.reason} at byte {cause.start}") from cause
    properties = {}
    for entry in text.split("\x02"):
        name, _, value = entry.partition("\x01")
        if name and value:
            properties[name] = value
    return properties


def refuse_internal(properties: Mapping[str, str]) -> None:
    """Raise IllegalMessage if a producer set a property that only a broker may set."""
    if not INTERNAL_PROPERTIES.isdisjoint(properties):
        name = min(INTERNAL_PROPERTIES.intersection(properties))
        raise IllegalMessage(f"property {name} = {_quote(properties[name])} is internal to the broker; do not set it")


def once_window_ms(record_end: bytes) -> int:
    """Return the window of a message that is stored once, by the end of its record: the broker writes that property
    behind all others.
    """
    return int(record_end[record_end.rindex(b"\x01") + 1 : -1])


def first_key(keys: str) -> str:
    """Return the first of the space-separated user keys of KEYS, or "" if there is none."""
    return keys.lstrip(" ").partition(" ")[0]


def other_keys(keys: str) -> list[str]:
    """Return the keys of KEYS behind the first one."""
    return [key for key in keys.split(" ") if key][1:]


def has_other_keys(keys: str) -> bool:
    """As bool(other_keys(keys)), for the hot path of sending."""
    return " " in keys and " " in keys.strip(" ")


# -------------------------------------------------------------------------------------------------------- checks

_NAME = re.compile(r"[%|a-zA-Z0-9_-]+")
_CHARACTERS_EXPECTED = "expected one or more of the characters % | a-z A-Z 0-9 _ -"


@lru_cache(_NAMES_CACHED_MAX)
def check_topic(name: str) -> None:
    """Raise IllegalMessage unless `name` is a topic's name by RocketMQ's rules. Whether it exists is not asked."""
    from_group = name.startswith((RETRY_TOPIC_PREFIX, DLQ_TOPIC_PREFIX))
    _check_name("topic", name, GROUP_TOPIC_CHARACTERS_MAX if from_group else TOPIC_CHARACTERS_MAX)


@lru_cache(_NAMES_CACHED_MAX)
def check_group(name: str) -> None:
    """Raise IllegalMessage unless `name` is a group's name by RocketMQ's rules."""
    _check_name("group", name, GROUP_CHARACTERS_MAX)


def _check_name(kind: str, name: str, characters_max: int) -> None:
    if len(name) > characters_max:
        raise IllegalMessage(f"{kind} {_quote(name)} has {len(name)} characters, the limit is {characters_max}")
    if not _NAME.fullmatch(name):
        raise IllegalMessage(f"{kind} {_quote(name)}: {_CHARACTERS_EXPECTED}")


def check_message(
    message: Message,
    body_bytes_max: int = BODY_BYTES_MAX_DEFAULT,
    properties_bytes_max: int = PROPERTIES_BYTES_MAX,
) -> None:
    """Raise IllegalMessage unless every field of the message fits its place in a record.

    The topic's name is left to `check_topic`, the meaning of the properties to `due` and `refuse_internal`.
    """
    # Unpacked once: this runs for every send, and reading ten attributes costs more than the checks.
    _, body, properties, queue_id, flag, sys_flag, born_at_ms, born_host, reconsume_times, prepared_offset = message
    if len(body) > body_bytes_max:
        raise IllegalMessage(f"body has {len(body)} bytes, the limit is {body_bytes_max}")
    if len(properties) > properties_bytes_max:
        raise IllegalMessage(f"properties have {len(properties)} bytes, the limit is {properties_bytes_max}")
    if queue_id < 0:
        raise IllegalMessage(f"queue_id is {queue_id}, expected 0 or more")
    try:
        _NUMBERS.pack(queue_id, flag, sys_flag, born_at_ms, reconsume_times, prepared_offset)
    except struct.error as cause:
        raise IllegalMessage(f"a number does not fit its field: {_numbers_out_of_range(message)}") from cause
    if not 0 <= reconsume_times <= TRIES_MAX:
        raise IllegalMessage(f"reconsume_times is {reconsume_times}, expected 0 to {TRIES_MAX}")
    address, port = born_host
    if len(address) not in (4, 16):
        raise IllegalMessage(f"born_host has an address of {len(address)} bytes, expected 4 or 16")
    if not 0 <= port <= PORT_MAX:
        raise IllegalMessage(f"born_host has port {port}, expected 0 to {PORT_MAX}")


# The numeric fields as the record holds them; packing them is the quickest way to check six ranges at once.
_NUMBERS = struct.Struct(">iiiqiq")


def _numbers_out_of_range(message: Message) -> str:
    fields = dict.fromkeys(("queue_id", "flag", "sys_flag", "reconsume_times"), 32)
    fields |= dict.fromkeys(("born_at_ms", "prepared_offset"), 64)
    return "; ".join(
        f"{name} is {number}, expected {bits} bits"
        for name, bits in fields.items()
        if not -(1 << bits - 1) <= (number := getattr(message, name)) < 1 << bits - 1
    )


def _quote(text: str) -> str:
    """Quote a client's text for an error, cut to what a reader needs."""
    if len(text) <= _SHOWN_CHARACTERS_MAX:
        return repr(text)
    return f"{text[:_SHOWN_CHARACTERS_MAX]!r}... ({len(text)} characters)"


# -------------------------------------------------------------------------------------------------- hashes and keys


@lru_cache(_TAGS_CACHED_MAX)
def tag_hash(tag: str) -> int:
    """Return Java's String.hashCode of a tag, a signed 32-bit number; 0 for "".

    Consumers compute the same number from their subscription and ask for it, so it must be Java's: a polynomial in 31
    over UTF-16 code units, of which a character beyond the basic plane has two.
    """
    total = 0
    units = memoryview(tag.encode("utf-16-le", "surrogatepass"))
    for low, high in zip(units[::2], units[1::2], strict=True):
        total = (31 * total + (high << 8 | low)) & 0xFFFFFFFF
    return total - 2**32 if total > INT32_MAX else total


class UniqueKeys:
    """Makes the ids that users see, in the form RocketMQ's Java producer gives them.

    ```
    address 4|16 | process id 2 | salt 4 | ms since the month began, UTC 4 | counter 2      upper-case hex
    ```

    Keys of one maker differ while it makes fewer than 65,536 in any millisecond; keys of two makers differ by address,
    process or salt. The month itself is not in the key, so a key may come back a month later, as in RocketMQ. Not for
    several threads at once.
    """

    def __init__(self, address: bytes, process_id: int, salt: int) -> None:
        """Raises UsageError unless the address has 4 or 16 bytes. Of the numbers the low 16 and 32 bits are used."""
        if len(address) not in (4, 16):
            raise UsageError(f"an address of {len(address)} bytes, expected 4 or 16")
        self._prefix = f"{address.hex()}{process_id & 0xFFFF:04x}{salt & 0xFFFFFFFF:08x}".upper()
        self._month_from_ms = self._month_to_ms = 0
        self._counter = 0

    def next(self, at_ms: int) -> str:
        """Return the next key, as made at `at_ms`."""
        if not self._month_from_ms <= at_ms < self._month_to_ms:
            day = datetime.fromtimestamp(at_ms // 1000, UTC)
            first = datetime(day.year, day.month, 1, tzinfo=UTC)
            following = datetime(day.year + day.month // 12, day.month % 12 + 1, 1, tzinfo=UTC)
            self._month_from_ms, self._month_to_ms = int(first.timestamp()) * 1000, int(following.timestamp()) * 1000
        key = f"{self._prefix}{at_ms - self._month_from_ms:08X}{self._counter:04X}"
        self._counter = (self._counter + 1) & 0xFFFF
        return key


# ------------------------------------------------------------------------------------------------------------ due

_LEVEL = re.compile(r"[0-9]{1,9}[smhd]")  # RocketMQ's grammar: one whole number, one unit


@dataclass(frozen=True, slots=True)
class DelayLevels:
    """The delays of level 1, 2, ... as `messageDelayLevel` lists them."""

    delays_ms: tuple[int, ...]

    @classmethod
    def parse(cls, text: str) -> "DelayLevels":
        """Read a list such as "1s 5s 1m 2h 1d". Raises UsageError naming the entry that cannot be read."""
        entries = text.split()
        if not entries:
            raise UsageError("delay levels are empty, expected at least one, such as 1s")
        if len(entries) > LEVELS_MAX:
            raise UsageError(f"there are {len(entries)} delay levels, the limit is {LEVELS_MAX}")
        return cls(tuple(_level_ms(entry) for entry in entries))

    @property
    def count(self) -> int:
        """How many levels there are; the highest level."""
        return len(self.delays_ms)

    def delay_ms(self, level: int) -> int:
        """Return the delay of a level; beyond the last level, the last one's. Raises UsageError below 1."""
        if level < 1:
            raise UsageError(f"delay level {level}, expected 1 or more")
        return self.delays_ms[min(level, self.count) - 1]


def _level_ms(entry: str) -> int:
    delay_ms = span_ms(entry) if _LEVEL.fullmatch(entry) else None
    if not delay_ms:
        raise UsageError(f"delay level {_quote(entry)}, expected a number above 0 and one of s, m, h, d, such as 30s")
    return delay_ms


class Due(NamedTuple):
    """When a message may become visible."""

    at_ms: int  # epoch milliseconds; 0 = at once
    level: int  # the delay level asked for, clamped to the last one; 0 = none


DELAY_PROPERTIES = frozenset(
    {PROPERTY_DELAY, PROPERTY_TIMER_DELAY_SEC, PROPERTY_TIMER_DELAY_MS, PROPERTY_TIMER_DELIVER_MS,
     PROPERTY_START_DELIVER_TIME}
)  # fmt: skip


def due(properties: Mapping[str, str], now_ms: int, levels: DelayLevels, delay_ms_max: int) -> Due:
    """Decide when a message is due; the only place that does.

    | first that applies            | due                  |
    |-------------------------------|----------------------|
    | DELAY above 0                 | now + level's delay  |
    | TIMER_DELAY_SEC is present    | now + value * 1000   |
    | TIMER_DELAY_MS is present     | now + value          |
    | TIMER_DELIVER_MS is present   | value                |
    | __STARTDELIVERTIME is present | value                |

    Those after the first are not even read. A due time at or before now is "at once"; none is rounded. Whether the
    message may be delayed at all (a prepared transaction may not) and what a delete marker means is the caller's.

    Raises IllegalMessage, naming property, value and what is expected, for a value that is not a whole number of 64
    bits, or a delay above `delay_ms_max`.
    """
    return Due(*due_and_level(properties, now_ms, levels, delay_ms_max))


def due_and_level(
    properties: Mapping[str, str], now_ms: int, levels: DelayLevels, delay_ms_max: int
) -> tuple[int, int]:
    """As `due`, for the hot path: a plain pair, and the properties one after the other rather than by a table."""
    get = properties.get
    level_text = get(PROPERTY_DELAY)
    if level_text is not None:
        level = min(_whole_number(PROPERTY_DELAY, level_text), levels.count)
        if level > 0:
            at_ms = now_ms + levels.delay_ms(level)
            return _within(PROPERTY_DELAY, level_text, now_ms, at_ms, delay_ms_max), level
    name, text = PROPERTY_TIMER_DELAY_SEC, get(PROPERTY_TIMER_DELAY_SEC)
    if text is not None:
        at_ms = now_ms + _whole_number(name, text) * 1_000
        return _within(name, text, now_ms, at_ms, delay_ms_max), 0
    name, text = PROPERTY_TIMER_DELAY_MS, get(PROPERTY_TIMER_DELAY_MS)
    if text is not None:
        return _within(name, text, now_ms, now_ms + _whole_number(name, text), delay_ms_max), 0
    name, text = PROPERTY_TIMER_DELIVER_MS, get(PROPERTY_TIMER_DELIVER_MS)
    if text is None:
        name, text = PROPERTY_START_DELIVER_TIME, get(PROPERTY_START_DELIVER_TIME)
    if text is not None:
        # As _whole_number, without the call: most timed messages come by here.
        at_ms = int(text) if len(text) < 19 and text.isascii() and text.isdigit() else _whole_number(name, text)
        is_usual = now_ms < at_ms <= now_ms + delay_ms_max
        return at_ms if is_usual else _within(name, text, now_ms, at_ms, delay_ms_max), 0
    return 0, 0


# Narrower than int(), which also takes spaces, underscores, other alphabets' digits and any length.
_WHOLE_NUMBER = re.compile(r"[+-]?[0-9]{1,19}")


def _whole_number(name: str, text: str) -> int:
    if len(text) < 19 and text.isascii() and text.isdigit():
        return int(text)  # the usual case, at a third of the pattern's price
    if _WHOLE_NUMBER.fullmatch(text):
        number = int(text)
        if INT64_MIN <= number <= INT64_MAX:
            return number
    raise IllegalMessage(f"property {name} = {_quote(text)}, expected a whole number of at most 64 bits")


def _within(name: str, text: str, now_ms: int, at_ms: int, delay_ms_max: int) -> int:
    """Return `at_ms`, or 0 if it has come; refuse it if it is too far away."""
    if at_ms - now_ms > delay_ms_max:
        raise IllegalMessage(
            f"property {name} = {_quote(text)} asks for a delay of {at_ms - now_ms} ms, the limit is {delay_ms_max} ms"
        )
    return at_ms if at_ms > now_ms else 0
