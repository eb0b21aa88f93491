"""Which messages of the table still wait: the one rule, over Arrow columns and as SQL beside it.

A file of the table never changes. A row of its own takes a message back, until both leave the table. So a message waits
unless one of these holds:

    it is not taken yet    it arrived after the place that counts          has_arrived      HAS_ARRIVED
    it is promoted         it is due at or before the horizon, not late    is_unpromoted    IS_UNPROMOTED
    it is cancelled        a cancel of the same topic, due and key         Removals         IS_CANCELLED
                           came after it
    it is dropped          a drop has the same due and arrival: a job      Removals         IS_DROPPED
                           cancelled or postponed it; or a move has the
                           same due, and the arrival as its unique hash

The core applies the same rule to the rows that it holds, without pyarrow; both share the comparison of arrivals.
Executors import this module: it needs the standard library and pyarrow.
"""

import json
from collections.abc import Callable, Collection
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from postdate.arrival import JOB_SHIFT, OWN, came_before
from postdate.storage import record as records
from postdate.table.format import CANCEL, DROP, MESSAGE, MOVE, SCHEMA

# Whether a message has the key that a cancel names, by their row numbers: equal hashes are only a hint.
HasKey = Callable[[int, int], bool]

_HASHES = ("unique_hash", "key_hash")
CANCEL_COLUMNS = ("due", "arrival", "topic", *_HASHES, "tag_hash")  # `tag_hash`: how many jobs came before the cancel
DROP_COLUMNS = ("due", "arrival")
_NONE = SCHEMA.empty_table()

# -- columns ----------------------------------------------------------------------------------------------------


def has_arrived(arrival: Any, before: int, untaken_jobs: Collection[int] = ()) -> Any:
    """Returns which rows arrived before a place in the log. A row that a job brought has no place there: it has
    arrived unless its job is among those that the table has not taken yet.
    """
    found = pc.or_(pc.less(arrival, before), pc.greater_equal(arrival, OWN))
    if untaken_jobs:
        job = pc.shift_right(pc.subtract(arrival, OWN), JOB_SHIFT)
        is_untaken = pc.is_in(job, pa.array(sorted(untaken_jobs), pa.int64()))
        found = pc.and_not(found, pc.and_(pc.greater_equal(arrival, OWN), is_untaken))
    return found


def is_unpromoted(due: Any, arrival: Any, horizon: int, late_from: int) -> Any:
    """Returns which rows of taken files no promotion has had: those due after the horizon, and the late ones, which
    arrived at or after a place. A row that a job brought is late in its own batch alone, whose files count as a whole.
    """
    is_late = pc.and_(pc.greater_equal(arrival, late_from), pc.less(arrival, OWN))
    return pc.or_(pc.greater(due, horizon), is_late)


def drops_of(rows: pa.Table) -> pa.Table:
    """Returns due and arrival of the messages that drops and moves among rows of the table take away one by one."""
    kind = rows["kind"]
    drops, moves = (rows.filter(pc.equal(kind, each)) for each in (DROP, MOVE))
    moved = pa.table({"due": moves["due"], "arrival": moves["unique_hash"]})
    return pa.concat_tables([drops.select(list(DROP_COLUMNS)).cast(moved.schema), moved])


def names_key(cancel: bytes, message: bytes) -> bool:
    """Whether the record of a cancel names the key of a message's record: equal hashes are only a hint."""
    asked = json.loads(records.decode(cancel).body)
    return records.is_of_key(message, asked["topic"], asked["key"], asked["by"])


class Removals:
    """The cancels and drops that take messages away. Two messages are of one topic where their columns `topic` are
    equal, whether those hold names or numbers.
    """

    def __init__(self, cancels: pa.Table = _NONE, drops: pa.Table = _NONE) -> None:
        self._drops = drops
        # By column of the hash: the hashes, and (arrival, jobs before it, row number) of each cancel by place and hash.
        self._hashes: dict[str, pa.Array] = {}
        self._cancels: dict[str, dict[tuple[int, Any, int], list[tuple[int, int, int]]]] = {}
        for column in _HASHES:
            rows = pc.indices_nonzero(pc.not_equal(cancels[column], 0))
            names = ("due", "topic", column, "arrival", "tag_hash")
            values = (cancels[name].take(rows).to_pylist() for name in names)
            by_place: dict[tuple[int, Any, int], list[tuple[int, int, int]]] = {}
            for due, topic, hashed, arrival, jobs, row in zip(*values, rows.to_pylist(), strict=True):
                by_place.setdefault((due, topic, hashed), []).append((arrival, jobs, row))
            if by_place:
                self._hashes[column] = pa.array(sorted({hashed for _, _, hashed in by_place}), pa.int64())
                self._cancels[column] = by_place

    @classmethod
    def of(cls, rows: pa.Table) -> "Removals":
        """What takes messages away among rows of the table; row numbers of cancels are those among the cancels."""
        return cls(rows.filter(pc.equal(rows["kind"], CANCEL)), drops_of(rows))

    @property
    def columns(self) -> list[str]:
        """The columns of messages that `living` needs."""
        return ["due", "arrival", *(["topic", *self._cancels] if self._cancels else [])]

    def living(self, messages: pa.Table, has_key: HasKey | None = None) -> Any:
        """Returns a mask: the messages that no cancel and no drop takes away. Without `has_key`, equal hashes of 64
        bits count as equal keys.
        """
        removed = pa.concat_arrays([self._find_dropped(messages), self._find_cancelled(messages, has_key)])
        if not len(removed):
            return pa.repeat(pa.scalar(True), messages.num_rows)
        return pc.invert(pc.is_in(pa.arange(0, messages.num_rows, 1), removed.cast(pa.int64())))

    def _find_dropped(self, messages: pa.Table) -> pa.Array:
        """Returns row numbers. Looks only at drops inside the ranges of the messages: a large job leaves a million, and
        many files are asked about them, each of which spans few arrivals or few dues.
        """
        nothing = pa.array([], pa.uint64())
        if not self._drops.num_rows or not messages.num_rows:
            return nothing
        drops = self._drops
        for name in DROP_COLUMNS:
            ends = pc.min_max(messages[name])
            drops = drops.filter(
                pc.and_(pc.greater_equal(drops[name], ends["min"]), pc.less_equal(drops[name], ends["max"]))
            )
        rows = pc.indices_nonzero(pc.is_in(messages["arrival"], drops["arrival"].combine_chunks()))
        if not len(rows):
            return nothing
        found = messages.select(list(DROP_COLUMNS)).take(rows).append_column("row", rows)
        found = found.join(drops.select(list(DROP_COLUMNS)), list(DROP_COLUMNS), join_type="left semi")
        return found["row"].combine_chunks()

    def _find_cancelled(self, messages: pa.Table, has_key: HasKey | None) -> pa.Array:
        """Returns row numbers. Compares one by one where hashes are equal, because those are few."""
        cancelled = set()
        for column, by_place in self._cancels.items():
            rows = pc.indices_nonzero(pc.is_in(messages[column], self._hashes[column]))
            values = (messages[name].take(rows).to_pylist() for name in ("due", "topic", column, "arrival"))
            for due, topic, hashed, arrival, row in zip(*values, rows.to_pylist(), strict=True):
                for cancel_arrival, jobs, cancel in by_place.get((due, topic, hashed), ()):
                    if came_before(arrival, cancel_arrival, jobs) and (has_key is None or has_key(row, cancel)):
                        cancelled.add(row)
                        break
        return pa.array(sorted(cancelled), pa.uint64())


# -- SQL --------------------------------------------------------------------------------------------------------
# In the dialect that Spark and DuckDB share. A message is m, a cancel c, a drop d. docs/readers.md shows WAITING.

HAS_ARRIVED = f"(m.arrival < {{before}} or m.arrival >= {OWN})"
CAME_BEFORE = f"""case when m.arrival < {OWN} then m.arrival < {{arrival}}
               else (m.arrival - {OWN}) >> {JOB_SHIFT} < {{number}} end"""
IS_UNPROMOTED = f"(m.due > {{horizon}} or (m.arrival >= {{late_from}} and m.arrival < {OWN}))"
IS_CANCELLED = f"""c.topic = m.topic and c.due = m.due
      and ((c.unique_hash <> 0 and c.unique_hash = m.unique_hash) or (c.key_hash <> 0 and c.key_hash = m.key_hash))
      and case when m.arrival < {OWN} then m.arrival < c.arrival
               else (m.arrival - {OWN}) >> {JOB_SHIFT} < c.tag_hash end"""
DROPS = f"({DROP}, {MOVE})"  # kinds of d
IS_DROPPED = f"d.due = m.due and case when d.kind = {MOVE} then d.unique_hash else d.arrival end = m.arrival"

WAITING = f"""
select * from messages m
where m.kind = {MESSAGE} and m.due > $after
  and not exists (
    select 1 from messages c
    where c.kind = {CANCEL} and {IS_CANCELLED})
  and not exists (
    select 1 from messages d
    where d.kind in {DROPS} and {IS_DROPPED})
"""
