"""The queries of docs/readers.md find what waits, and nothing else, in a table that has every kind of row."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from postdate.clock import SystemClock
from postdate.table import files
from postdate.table.format import CANCEL, DROP, MESSAGE, ORDER, SCHEMA, own_arrival
from tests.docs.test_docs import READERS, blocks_of
from tests.support.carrying import World
from tests.support.helpers import HOUR_MS, MINUTE_MS, TOPIC


def row(key: str, due: int, arrival: int, kind: int = MESSAGE, **more: Any) -> dict[str, Any]:
    plain = {"topic": TOPIC, "queue": 0, "level": 0, "tag_hash": 0, "unique_hash": 0, "key_hash": 0, "flags": 0}
    known = {"key": key, "tag": None, "size": 1, "record": b"x", "due": due, "arrival": arrival, "kind": kind}
    return plain | known | more


def add(world: World, rows: list[dict[str, Any]]) -> None:
    """Rows as nobody here can send them yet."""
    table = world.pipeline.table
    made = pa.Table.from_pylist(rows, SCHEMA).sort_by(ORDER)
    table.commit([files.write(table.place, "soon-by-hand.parquet", made)])


def sent(world: World, due: int) -> set[str]:
    """Messages and cancels through broker and batches, in several files; the keys of those that wait."""
    world.send("a", [due, due + 1, due + 2, due + 3], keys=["stays", "by-id", "by-key", "again"])
    world.batch()
    world.cancel("a-u1", due + 1, "unique")
    world.cancel("by-key", due + 2, "key")
    world.cancel("again", due + 3, "key")
    world.cancel("stays", due + 5, "key")  # of another due: it is for nobody
    world.served.pass_ms(MINUTE_MS)
    world.batch()
    world.send("b", [due + 3], keys=["again"])
    world.served.pass_ms(MINUTE_MS)
    world.batch()
    return {"stays", "again"}


def made(due: int, now_ms: int) -> tuple[list[dict[str, Any]], set[str]]:
    """Rows by hand, and the keys of those that wait."""
    late = 1 << 50  # an arrival behind all that was sent
    of_key = {"key_hash": -7, "unique_hash": 0}
    rows = [
        row("promoted", now_ms + MINUTE_MS, late),
        row("cancel-7", due, late + 9, CANCEL, tag_hash=4, **of_key),
        row("cancelled", due, late + 1, **of_key),
        row("of-another-due", due + 1, late + 2, **of_key),
        row("of-another-topic", due, late + 3, topic="bills", **of_key),
        row("of-no-key", due, late + 4),
        row("sent-later", due, late + 10, **of_key),
        row("of-an-earlier-job", due, own_arrival(3, 1, 17), **of_key),
        row("of-a-later-job", due, own_arrival(4), **of_key),
        row("cancel-8", due, late + 11, CANCEL, unique_hash=8),
        row("has-its-key-for-an-id", due, late + 5, key_hash=8),
        row("dropped", due, late + 6),
        row("", due, late + 6, DROP),
        row("dropped-of-a-job", due, own_arrival(9, 2, 3)),
        row("", due, own_arrival(9, 2, 3), DROP),
        row("beside-a-drop", due, late + 7),
        row("", due + 1, late + 7, DROP),
    ]
    waits = {
        "of-another-due", "of-another-topic", "of-no-key", "sent-later", "of-a-later-job", "has-its-key-for-an-id",
        "beside-a-drop",
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


def test_a_filter_by_any_column_finds_its_rows(tmp_path: Path) -> None:
    """The Delta log has statistics of two columns; a reader must not believe that the others are empty."""
    import pyarrow.compute as pc
    from deltalake import DeltaTable

    world = World(tmp_path)
    try:
        world.send("a", [world.clock.now_ms() + HOUR_MS])
        world.batch()
    finally:
        world.close()
    dataset = DeltaTable(str(tmp_path / "table" / "messages")).to_pyarrow_dataset()
    (found,) = dataset.to_table().to_pylist()
    for name, value in found.items():
        assert dataset.count_rows(filter=pc.field(name) == value) == 1, name
