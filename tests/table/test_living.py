"""Which messages wait: columns and SQL give the same answer on any table, and so do the queries of docs/readers.md."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import duckdb
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from postdate.arrival import OWN, own_arrival
from postdate.clock import SystemClock
from postdate.table import files
from postdate.table.format import CANCEL, DROP, MESSAGE, MOVE, ORDER, SCHEMA
from postdate.table.living import HAS_ARRIVED, IS_UNPROMOTED, WAITING, Removals, has_arrived, is_unpromoted
from tests.docs.test_docs import READERS, blocks_of
from tests.support.core import HOUR_MS, MINUTE_MS, TOPIC
from tests.support.pipeline import World

Row = dict[str, Any]

DUCKDB = duckdb.connect(config={"threads": 1})  # opening one takes longer than a query
DUES = some.integers(1, 4)
ARRIVALS = some.one_of(
    some.integers(1, 9), some.builds(own_arrival, some.integers(0, 3), some.integers(0, 1), some.integers(0, 2))
)
PLACES = some.one_of(some.integers(0, 10), some.just(OWN), some.just(OWN + 7))
HASHES = some.sampled_from([0, 5, -6])
KINDS = [MESSAGE, MESSAGE, CANCEL, DROP, MOVE]
FIXED = {"queue": 0, "level": 0, "flags": 0, "key": None, "tag": None, "size": 1, "record": b""}
ROWS = some.fixed_dictionaries(
    {
        "due": DUES, "arrival": ARRIVALS, "kind": some.sampled_from(KINDS),
        "topic": some.sampled_from(["a", "b"]), "unique_hash": HASHES, "key_hash": HASHES,
        "tag_hash": some.integers(0, 4), "target": ARRIVALS,
    }
).map(lambda row: FIXED | aim_move(**row))  # fmt: skip
TABLES = some.lists(ROWS, max_size=14)


def aim_move(target: Any, **row: Any) -> Row:
    """A move has, in the place of a hash, the arrival of the message that it takes away."""
    return row | ({"unique_hash": target} if row["kind"] == MOVE else {})


def numbered(rows: Iterable[Row]) -> pa.Table:
    """Rows as the table has them; `size` tells them apart."""
    return pa.Table.from_pylist([row | {"size": number} for number, row in enumerate(rows)], SCHEMA)


def by_columns(table: pa.Table, horizon: int) -> list[int]:
    messages = table.filter(pc.and_(pc.equal(table["kind"], MESSAGE), pc.greater(table["due"], horizon)))
    found: list[int] = messages.filter(Removals.of(table).living(messages))["size"].to_pylist()
    return found


def by_sql(table: pa.Table, query: str, **values: int) -> list[int]:
    DUCKDB.register("messages", table)
    return sorted(size for (size,) in DUCKDB.execute(f"select size from ({query})", values).fetchall())


@settings(max_examples=300, deadline=None)
@given(TABLES, some.integers(0, 4))
def test_columns_and_sql_find_the_same_messages(rows: list[Row], horizon: int) -> None:
    table = numbered(rows)
    assert by_columns(table, horizon) == by_sql(table, WAITING, after=horizon)


@settings(max_examples=150, deadline=None)
@given(TABLES, PLACES, some.integers(0, 4))
def test_columns_and_sql_agree_on_places_and_horizon(rows: list[Row], place: int, horizon: int) -> None:
    table = numbered(rows)
    due, arrival = table["due"], table["arrival"]
    arrived, unpromoted = has_arrived(arrival, place), is_unpromoted(due, arrival, horizon, place)
    where = "select * from messages m where "
    assert table.filter(arrived)["size"].to_pylist() == by_sql(table, where + HAS_ARRIVED.format(before=place))
    query = where + IS_UNPROMOTED.format(horizon=horizon, late_from=place)
    assert table.filter(unpromoted)["size"].to_pylist() == by_sql(table, query)


def unique_arrivals(rows: list[Row]) -> list[Row]:
    """As the table is: one message of each arrival, though perhaps twice, for a row may be restored."""
    first = {row["arrival"]: row for row in reversed(rows) if row["kind"] == MESSAGE}
    return [first[row["arrival"]] if row["kind"] == MESSAGE else row for row in rows]


def readers() -> dict[str, Any]:
    """The names that the examples of docs/readers.md define before they read a table."""
    names: dict[str, Any] = {"pl": pl}
    for block in blocks_of(READERS.read_text()):
        text = "\n".join(block.lines)
        if block.kind == "python" and "def waiting" in text:
            exec(text.partition("\ntable = ")[0], names)
        elif block.kind == "python" and "WAITING = " in text:
            exec("WAITING = " + text.partition("WAITING = ")[2].partition("\n\n")[0], names)
    return names


def test_the_query_of_the_docs_is_the_rule() -> None:
    assert readers()["WAITING"] == WAITING


@settings(max_examples=150, deadline=None)
@given(TABLES.map(unique_arrivals), some.integers(0, 4))
def test_polars_finds_the_same_messages(rows: list[Row], horizon: int) -> None:
    table = numbered(rows)
    found = readers()["waiting"](pl.DataFrame(table).lazy(), horizon).collect()
    assert sorted(found["size"].to_list()) == by_columns(table, horizon)


# -- by example -------------------------------------------------------------------------------------------------


def row(arrival: int, kind: int = MESSAGE, **more: Any) -> Row:
    return FIXED | {"due": 1, "topic": "a", "unique_hash": 5, "key_hash": 0, "tag_hash": 0} | more | {
        "arrival": arrival, "kind": kind,
    }  # fmt: skip


def test_a_cancel_is_for_messages_that_came_before_it() -> None:
    rows = [row(7, CANCEL, tag_hash=2), row(6), row(8), row(own_arrival(1)), row(own_arrival(2))]
    assert by_columns(numbered(rows), 0) == [2, 4], "a cancel knows how many jobs came before it"


def test_a_cancel_of_one_key_is_not_for_the_other() -> None:
    rows = [row(7, CANCEL), row(1, unique_hash=0, key_hash=5), row(2, topic="b"), row(3, due=2), row(4)]
    assert by_columns(numbered(rows), 0) == [1, 2, 3]


def test_a_drop_is_for_one_due_and_arrival() -> None:
    rows = [row(1, DROP), row(1), row(1), row(1, due=2), row(2)]
    assert by_columns(numbered(rows), 0) == [3, 4]


def test_a_move_is_for_one_due_and_arrival_however_it_came_itself() -> None:
    rows = [row(9, MOVE, unique_hash=1), row(1), row(1, due=2), row(2), row(9), row(own_arrival(1))]
    rows += [row(11, MOVE, unique_hash=own_arrival(1)), row(12, MOVE, unique_hash=9, due=2)]
    assert by_columns(numbered(rows), 0) == [2, 3, 4]


def test_equal_hashes_are_told_apart_where_keys_can_be_compared() -> None:
    table = numbered([row(7, CANCEL), row(8, CANCEL), row(1), row(2), row(9)])
    messages = table.filter(pc.equal(table["kind"], MESSAGE))
    asked = []

    def has_key(message: int, cancel: int) -> bool:
        asked.append((message, cancel))
        return (message, cancel) == (1, 1)

    assert Removals.of(table).living(messages, has_key).to_pylist() == [True, False, True]
    assert asked == [(0, 0), (0, 1), (1, 0), (1, 1)], "by number among messages and among cancels"


def test_what_an_untaken_job_brought_has_not_arrived() -> None:
    arrival = pa.array([1, 5, own_arrival(1), own_arrival(2), own_arrival(3)])
    assert has_arrived(arrival, 5).to_pylist() == [True, False, True, True, True]
    assert has_arrived(arrival, 5, {2, 7}).to_pylist() == [True, False, True, False, True]


# -- the readers of docs/readers.md, on a table that broker and pipeline made --------------------------------------


def reader_row(key: str, due: int, arrival: int, kind: int = MESSAGE, **more: Any) -> dict[str, Any]:
    plain = {"topic": TOPIC, "queue": 0, "level": 0, "tag_hash": 0, "unique_hash": 0, "key_hash": 0, "flags": 0}
    known = {"key": key, "tag": None, "size": 1, "record": b"x", "due": due, "arrival": arrival, "kind": kind}
    return plain | known | more


def add(world: World, rows: list[dict[str, Any]]) -> None:
    """Adds rows that only jobs and years of use would make."""
    table = world.pipeline.table
    made = pa.Table.from_pylist(rows, SCHEMA).sort_by(ORDER)
    table.commit([files.write_file(table.folder, "soon-by-hand.parquet", made)])


def sent(world: World, due: int) -> set[str]:
    """Messages and cancels through broker and batches, in several files; the keys of those that wait."""
    world.send("a", [due, due + 1, due + 2, due + 3], keys=["stays", "by-id", "by-key", "again"])
    world.batch()
    world.cancel("a-u1", due + 1, "unique")
    world.cancel("by-key", due + 2, "key")
    world.cancel("again", due + 3, "key")
    world.cancel("stays", due + 5, "key")  # of another due: it cancels nothing
    world.served.pass_ms(MINUTE_MS)
    world.batch()
    world.send("b", [due + 3], keys=["again"])
    world.served.pass_ms(MINUTE_MS)
    world.batch()
    return {"stays", "again"}


def made(due: int, now_ms: int) -> tuple[list[dict[str, Any]], set[str]]:
    """Rows by hand, and the keys of those that wait."""
    late = 1 << 50  # an arrival after all that was sent
    of_key = {"key_hash": -7, "unique_hash": 0}
    rows = [
        reader_row("promoted", now_ms + MINUTE_MS, late),
        reader_row("cancel-7", due, late + 9, CANCEL, tag_hash=4, **of_key),
        reader_row("cancelled", due, late + 1, **of_key),
        reader_row("of-another-due", due + 1, late + 2, **of_key),
        reader_row("of-another-topic", due, late + 3, topic="bills", **of_key),
        reader_row("of-no-key", due, late + 4),
        reader_row("sent-later", due, late + 10, **of_key),
        reader_row("of-an-earlier-job", due, own_arrival(3, 1, 17), **of_key),
        reader_row("of-a-later-job", due, own_arrival(4), **of_key),
        reader_row("cancel-8", due, late + 11, CANCEL, unique_hash=8),
        reader_row("has-its-key-for-an-id", due, late + 5, key_hash=8),
        reader_row("dropped", due, late + 6),
        reader_row("", due, late + 6, DROP),
        reader_row("dropped-of-a-job", due, own_arrival(9, 2, 3)),
        reader_row("", due, own_arrival(9, 2, 3), DROP),
        reader_row("moved", due, late + 8),
        reader_row("", due, late + 13, MOVE, unique_hash=late + 8),
        reader_row("moved-to", due + 2, late + 12),
        reader_row("beside-a-drop", due, late + 7),
        reader_row("", due + 1, late + 7, DROP),
    ]
    waits = {
        "of-another-due", "of-another-topic", "of-no-key", "sent-later", "of-a-later-job", "has-its-key-for-an-id",
        "beside-a-drop", "moved-to",
    }  # fmt: skip
    return rows, waits


def test_both_readers_find_what_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    now_ms = SystemClock().now_ms()
    due = now_ms + HOUR_MS
    world = World(tmp_path / "postdate-data", now_ms)
    try:
        waits = sent(world, due)
        rows, more = made(due + MINUTE_MS, now_ms)
        add(world, rows)
    finally:
        world.close()
    names: dict[str, Any] = {}
    for block in blocks_of(READERS.read_text()):
        if block.kind == "python" and "record.decode" not in "\n".join(block.lines):  # those by hand have none
            exec("\n".join(block.lines), names)
    by_duckdb = [key for key, _ in names["rows"]]
    by_polars = names["ahead"]["key"].to_list()
    assert sorted(by_duckdb) == sorted(waits | more)
    assert by_polars == by_duckdb, "in the same order"
