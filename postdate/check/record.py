"""A record against the row that stands for it: in a batch of the log or in the index of a chunk."""

import json
from collections.abc import Callable, Iterator

from postdate.broker.sending import SYSTEM_TOPIC_PREFIX
from postdate.errors import IllegalMessage
from postdate.keys import key_hash
from postdate.message import (
    DEFAULT_LEVELS_TEXT,
    PROPERTY_KEYS,
    PROPERTY_TAGS,
    PROPERTY_UNIQ_KEY,
    DelayLevels,
    decode_properties,
    due,
    first_key,
    other_keys,
    tag_hash,
)
from postdate.state.wheel import NEVER
from postdate.storage import record as records
from postdate.storage.batch import KIND_NAMES, MORE_KEYS

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
    _, level, flags, _, due_at_ms, unique_hash, first_hash, tagged, *_ = row
    try:
        properties = decode_properties(record.properties)
    except IllegalMessage as error:
        return str(error)
    problem = due_problem(properties, due_at_ms, level, at_ms)
    if problem:
        return problem
    more = bool(flags & MORE_KEYS)
    if more != bool(other_keys(properties.get(PROPERTY_KEYS, ""))):
        return f"the row says that there are {'more keys' if more else 'no more keys'} than the first; that is not so"
    return keys_problem(properties, unique_hash, first_hash, tagged)


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
