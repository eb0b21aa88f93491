"""Compares a record with the row that stands for it, in a batch of the log or in the index of a chunk.

It also collects what is known of all records, for the checks of rows that point at them.
"""

import json
from collections.abc import Callable, Iterator

import numpy as np

from postdate.arrival import NEVER, OWN
from postdate.errors import IllegalMessage
from postdate.keys import key_hash, once_hash, once_name
from postdate.message import (
    DEFAULT_LEVELS_TEXT,
    PROPERTY_KEYS,
    PROPERTY_ONCE,
    PROPERTY_ONCE_MS,
    PROPERTY_PRODUCER_GROUP,
    PROPERTY_TAGS,
    PROPERTY_UNIQ_KEY,
    SYS_COMMITTED,
    SYS_HALF,
    DelayLevels,
    decode_properties,
    due,
    first_key,
    other_keys,
    tag_hash,
)
from postdate.storage import record as records
from postdate.storage.batch import COMMIT, KIND_NAMES, MESSAGE, MORE_KEYS, SYSTEM_TOPIC_PREFIX, Batch
from postdate.storage.chunk import FLAG_OWN_ARRIVAL
from postdate.storage.layout import ROW

_LEVELS = DelayLevels.parse(DEFAULT_LEVELS_TEXT)


class Places:
    """Which topic and queue id the records of each queue number name: compared with the topics once those are known."""

    def __init__(self) -> None:
        self._first: dict[tuple[int, str, int], str] = {}

    def note(self, number: int, topic: str, queue_id: int, place: Callable[[], str]) -> None:
        if (number, topic, queue_id) not in self._first:
            self._first[number, topic, queue_id] = place()

    def problems(self, places: list[tuple[str, int]]) -> Iterator[str]:
        for (number, topic, queue_id), place in self._first.items():
            expected = places[number] if 0 <= number < len(places) else None
            if expected is None:
                yield f"{place}: the record is for queue number {number}, there are {len(places)}"
            elif expected != (topic, queue_id):
                yield (
                    f"{place}: the record is for queue {queue_id} of {topic!r}, "
                    f"its row for number {number}, which is queue {expected[1]} of {expected[0]!r}"
                )


def keys_problem(properties: dict[str, str], unique_hash: int, first_hash: int, tagged: int) -> str:
    """A message's properties against the hashes that its row holds."""
    if key_hash(properties.get(PROPERTY_UNIQ_KEY, "")) != unique_hash:
        return "the row's hash is not that of the unique key"
    if key_hash(first_key(properties.get(PROPERTY_KEYS, ""))) != first_hash:
        return "the row's hash is not that of the first key"
    if tag_hash(properties.get(PROPERTY_TAGS, "")) != tagged:
        return f"the row's tag hash is {tagged}, not that of the tag"
    return ""


def due_problem(properties: dict[str, str], due_at_ms: int, level: int, at_ms: int) -> str:
    """A message's properties against the due and the level that its row holds; it came at `at_ms`."""
    try:
        # What a level meant is a setting and stands nowhere; all other delays say their due themselves.
        expected = due(properties, at_ms, _LEVELS, NEVER) if not level else (due_at_ms, 0)
    except IllegalMessage as error:
        return str(error)
    if expected != (due_at_ms, 0):
        return f"the row says due {due_at_ms} and level {level}, the properties {expected[0]} and {expected[1]}"
    return ""


def message_problem(record: records.Record, row: tuple[int, ...], at_ms: int) -> str:
    _, level, flags, _, due_at_ms, unique_hash, first_hash, tagged, _, _, once = row
    try:
        properties = decode_properties(record.properties)
    except IllegalMessage as error:
        return str(error)
    problem = due_problem(properties, due_at_ms, level, at_ms)
    if problem:
        return problem
    if row[0] == COMMIT and record.sys_flag & (SYS_HALF | SYS_COMMITTED) != SYS_COMMITTED:
        return f"the row says commit, the record's sys flag is {record.sys_flag}"
    more = bool(flags & MORE_KEYS)
    if more != bool(other_keys(properties.get(PROPERTY_KEYS, ""))):
        return f"the row says that there are {'more keys' if more else 'no more keys'} than the first; that is not so"
    if once and once != once_hash(once_name(record.topic, properties.get(PROPERTY_ONCE, ""))):
        return "the row's hash is not that of the id under which the message is stored once"
    window = f"{PROPERTY_ONCE_MS}\x01{properties.get(PROPERTY_ONCE_MS)}\x02".encode()
    if once and not record.properties.endswith(window):
        return "the row says that the message is stored once, its last property is no window"
    return keys_problem(properties, unique_hash, first_hash, tagged)


def half_problem(record: records.Record, row: tuple[int, ...]) -> str:
    try:
        properties = decode_properties(record.properties)
    except IllegalMessage as error:
        return str(error)
    if not record.sys_flag & SYS_HALF:
        return f"the row says half, the record's sys flag is {record.sys_flag}"
    if (row[1], row[2], row[6], row[7], row[10]) != (0, 0, 0, 0, 0):
        return f"the row of a half holds {row[1:]} where nothing belongs"
    lacking = [name for name in (PROPERTY_PRODUCER_GROUP, PROPERTY_UNIQ_KEY) if name not in properties]
    if lacking:
        return f"the half has no property {lacking[0]}"
    if key_hash(properties[PROPERTY_UNIQ_KEY]) != row[5]:
        return "the row's hash is not that of the unique key"
    return ""


def system_problem(record: records.Record, row: tuple[int, ...]) -> str:
    if row[0] not in KIND_NAMES:
        return f"the row says kind {row[0]}, which this program does not know"
    if record.topic != SYSTEM_TOPIC_PREFIX + KIND_NAMES[row[0]]:
        return f"the row says {KIND_NAMES[row[0]]}, the record is of topic {record.topic!r}"
    if row[1:8] != (0, 0, -1, 0, 0, 0, 0):
        return f"the row of a {KIND_NAMES[row[0]]} holds {row[1:8]} where nothing belongs"
    try:
        json.loads(record.body)
    except ValueError as error:
        return f"the body of a {KIND_NAMES[row[0]]} is no JSON: {error}"
    return ""


# One row per record, ascending by offset.
KNOWN = np.dtype(
    [
        ("offset", "<i8"),
        ("due", "<i8"),  # 0 = at once
        ("arrival", "<i8"),
        ("came_at", "<i8"),  # when it came into the wheel; NEVER where that is not known
        ("identity", "<i8"),  # equal for two copies of one message
        ("size", "<i8"),
        ("queue", "<i4"),
        ("tag_hash", "<i4"),
        ("unique_hash", "<u8"),
        ("key_hash", "<u8"),
        ("kind", "u1"),
        ("level", "u1"),
    ]
)


class Collected:
    """The rows of all batches of the log, with what their batch says, put together once at the end."""

    def __init__(self) -> None:
        self._rows = bytearray()
        self._batches: list[tuple[int, int, int, int]] = []  # row count, offset, at_ms, latest due that came at once

    def add(self, batch: Batch, near_until: int) -> None:
        if batch.row_count:
            self._rows += batch.rows
            self._batches.append((batch.row_count, batch.offset, batch.at_ms, near_until))

    def known_records(self) -> np.ndarray:
        rows = np.frombuffer(self._rows, ROW)
        counts, offsets, at_ms, near_until = np.array(self._batches, np.int64).reshape(-1, 4).T
        known = np.empty(len(rows), KNOWN)
        known["offset"] = np.repeat(offsets, counts) + rows["position"]
        known["arrival"] = known["identity"] = known["offset"]
        near = rows["due"] <= np.repeat(near_until, counts)
        known["came_at"] = np.where(near, np.repeat(at_ms, counts), NEVER)
        for name in ("due", "size", "queue", "tag_hash", "unique_hash", "key_hash", "kind", "level"):
            known[name] = rows[name]
        return known


def known_of_chunk(base: int, index: np.ndarray, came_at: int) -> np.ndarray:
    known = np.zeros(len(index), KNOWN)
    known["offset"] = index["position"] + base
    # An arrival of its own below OWN is another program's, and says nothing.
    is_unknown = (index["flags"] & FLAG_OWN_ARRIVAL != 0) & (index["arrival"] < OWN)
    known["identity"] = np.where(is_unknown, known["offset"], index["arrival"])
    known["came_at"], known["kind"] = came_at, MESSAGE
    for name in ("due", "arrival", "size", "queue", "tag_hash"):
        known[name] = index[name]
    return known


class Index:
    """Finds what is known of a record by its offset."""

    def __init__(self, parts: list[np.ndarray]) -> None:
        known = np.concatenate(parts)
        self.known = known[np.argsort(known["offset"], kind="stable")]
        self._offsets = np.ascontiguousarray(self.known["offset"])

    def find(self, offsets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(found, rows): whether there is a record at each offset, and what is known of it (anything where none is)."""
        if not len(self.known):
            return np.zeros(len(offsets), np.bool_), np.zeros(len(offsets), KNOWN)
        places = np.minimum(np.searchsorted(self._offsets, offsets), len(self._offsets) - 1)
        return self._offsets[places] == offsets, self.known[places]
