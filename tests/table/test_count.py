"""How much waits: in real Delta tables, and in broker and table together, wherever a message is on its way."""

from pathlib import Path
from typing import Any

import pytest

from postdate.arrival import own_arrival
from postdate.client import admin
from postdate.counts import Counts, Seconds
from postdate.keys import key_hash
from postdate.table.find import TableReader
from postdate.table.format import DROP
from tests.support.core import HOUR_MS, MINUTE_MS, TOPIC
from tests.support.pipeline import BEGIN, World
from tests.support.table_rows import Row, append, keyed_row, signed


def wish(**changed: Any) -> dict[str, Any]:
    """Queue 1 is of the topic, queue 0 is gone."""
    plain = {
        "unit_ms": 1_000, "limit": 100, "horizon": 0, "before": 1 << 60, "names": [TOPIC], "codes": [-1, 0],
        "cancels": [],
        "untaken_jobs": [],
    }  # fmt: skip
    return plain | changed


def counted(folder: Path, asked: dict[str, Any]) -> list[tuple[int, int, int]]:
    """(start of the unit, rows, bytes)"""
    counts = TableReader().count(str(folder), asked)
    assert isinstance(counts, Counts)
    assert counts.total.rows == sum(amount.rows for _, amount in counts.earliest())
    return [(at_ms, *amount) for (at_ms, _), amount in counts.earliest()]


def test_what_waits_in_the_table_is_counted(tmp_path: Path) -> None:
    append(tmp_path, *[keyed_row(1_000 * (n % 3 + 1) + n, n) for n in range(90)])
    append(tmp_path, keyed_row(9_000, 100), keyed_row(9_001, 101) | {"queue": 0}, keyed_row(9_002, 102) | {"queue": 7})
    assert counted(tmp_path, wish()) == [(1_000, 30, 3_000), (2_000, 30, 3_000), (3_000, 30, 3_000), (9_000, 1, 100)]
    assert counted(tmp_path, wish(horizon=3_050)) == [(3_000, 13, 1_300), (9_000, 1, 100)]
    assert counted(tmp_path, wish(before=3)) == [(1_000, 1, 100), (2_000, 1, 100), (3_000, 1, 100)]
    assert counted(tmp_path, wish(codes=[])) == []
    assert counted(tmp_path, wish(unit_ms=10_000)) == [(0, 91, 9_100)]
    seconds = TableReader().count(str(tmp_path), wish(from_ms=2_000, seconds=4))
    assert isinstance(seconds, Seconds)
    assert seconds.rows.tolist() == [30, 30, 0, 0]


@pytest.mark.parametrize("by", ["unique", "key"])
@pytest.mark.parametrize("is_taken", [True, False])
def test_what_is_cancelled_does_not_count(tmp_path: Path, by: str, is_taken: bool) -> None:
    """Whether the cancel is a row of the table or still the broker's; another key, due, topic or a later message is not
    meant.
    """
    hashed = signed(key_hash("A"))
    hashes = (hashed, 0) if by == "unique" else (0, hashed)

    def named(due: int, arrival: int) -> Row:
        return keyed_row(due, arrival, unique="A") if by == "unique" else keyed_row(due, arrival, keys="A x")

    append(
        tmp_path, named(5_000, 1), named(5_000, 2), keyed_row(5_000, 3, unique="B", keys="B"), named(5_001, 4),
        named(5_000, 5) | {"queue": 2}, named(5_000, 20),
    )  # fmt: skip
    asked = wish(names=[TOPIC, "other"], codes=[-1, 0, 1])
    assert sum(rows for _, rows, _ in counted(tmp_path, asked)) == 6
    if is_taken:
        append(tmp_path, keyed_row(5_000, 10, kind=2) | dict(zip(("unique_hash", "key_hash"), hashes, strict=True)))
    else:
        asked["cancels"] = [(5_000, 10, 0, *hashes, 0)]
    assert sum(rows for _, rows, _ in counted(tmp_path, asked)) == 4


def test_what_a_job_dropped_or_an_untaken_job_brought_does_not_count(tmp_path: Path) -> None:
    append(
        tmp_path,
        keyed_row(5_000, 1),
        keyed_row(5_000, 2),
        keyed_row(6_000, own_arrival(1)),
        keyed_row(6_000, own_arrival(2)),
    )
    append(tmp_path, keyed_row(5_000, 2) | {"kind": DROP}, keyed_row(5_001, 1) | {"kind": DROP})
    assert counted(tmp_path, wish()) == [(5_000, 1, 100), (6_000, 2, 200)]
    assert counted(tmp_path, wish(untaken_jobs=[2])) == [(5_000, 1, 100), (6_000, 1, 100)]


# -- counted by the broker: wheel, far queue and table together --------------------------------------------------


def ask_pending(world: World, **wish: Any) -> dict[str, Any]:
    found = admin.pending(world.served.server.broker_address, **wish)
    assert found["unread"] == ""
    assert (
        found["total"] == found["near"] + found["far"] + found["table"] == sum(row["count"] for row in found["times"])
    )
    assert found["bytes"] == sum(row["bytes"] for row in found["times"]) == sum(row["bytes"] for row in found["topics"])
    return found


def places(world: World) -> tuple[int, int, int]:
    found = ask_pending(world)
    return found["near"], found["far"], found["table"]


def test_what_an_import_has_brought_and_no_batch_has_taken_in_waits(tmp_path: Path) -> None:
    world = World(tmp_path)
    try:
        dues = [BEGIN + 2 * MINUTE_MS, BEGIN + HOUR_MS, BEGIN + HOUR_MS]
        world.import_messages("nightly", dues)
        assert places(world) == (0, 0, 3)
        whole = ask_pending(world)
        assert [bar["rows"] for bar in admin.forecast(world.address, "", "hour", 2)["bars"]] == [1, 2]
        world.pass_without_pipeline(MINUTE_MS)
        assert places(world) == (1, 0, 2), "bulk has brought the first"
        world.batch()
        assert places(world) == (1, 0, 2), "now the table has the others"
        assert ask_pending(world)["bytes"] == whole["bytes"]
    finally:
        world.close()


def test_what_a_decided_job_has_moved_counts_once_and_at_its_new_due(tmp_path: Path) -> None:
    """The table has not followed: its pipeline may be away."""
    world = World(tmp_path)
    try:
        world.send("a", [BEGIN + HOUR_MS, BEGIN + HOUR_MS + 1, BEGIN + 2 * HOUR_MS])
        world.batch()
        world.decide_postponement("later", 10 * HOUR_MS)
        hour_ms = BEGIN // HOUR_MS * HOUR_MS
        expected = [(11, 2), (12, 1)]
        for _ in range(2):
            times = ask_pending(world, unit="hour")["times"]
            assert [((row["from_ms"] - hour_ms) // HOUR_MS, row["count"]) for row in times] == expected
            assert places(world) == (0, 0, 3)
            world.batch()  # the second time the table has followed
    finally:
        world.close()


def test_what_was_moved_counts_once_and_at_its_new_due(tmp_path: Path) -> None:
    """Whether the table has the move, or the broker alone; and its message comes once, at that due."""
    world = World(tmp_path)
    try:
        world.send("a", [BEGIN + HOUR_MS, BEGIN + HOUR_MS, BEGIN + 2 * HOUR_MS])
        world.batch()
        world.move("a-u0", BEGIN + 3 * HOUR_MS)  # to another due in the table
        world.move("a-u2", BEGIN + 5 * MINUTE_MS)
        hour_ms = BEGIN // HOUR_MS * HOUR_MS
        for expected in ((0, 2, 1), (0, 0, 3)):
            times = ask_pending(world, unit="hour")["times"]
            assert [((row["from_ms"] - hour_ms) // HOUR_MS, row["count"]) for row in times] == [(0, 1), (1, 1), (3, 1)]
            assert places(world) == expected
            world.batch()
        world.pass_minutes(4)
        assert places(world) == (1, 0, 2), "one is promoted"
        world.move("a-u2", BEGIN + HOUR_MS)  # out of the wheel
        assert places(world) == (0, 1, 2)
        world.move("a-u1", BEGIN)  # at once
        assert list(world.shown()) == ["a 1"]
        assert places(world) == (0, 1, 1)
        world.batch()
        assert places(world) == (0, 0, 2)
    finally:
        world.close()


def test_the_sum_is_what_waits_wherever_it_lies(tmp_path: Path) -> None:
    world = World(tmp_path)
    try:
        assert places(world) == (0, 0, 0)
        dues = [BEGIN + 5 * MINUTE_MS, BEGIN + 5 * MINUTE_MS, BEGIN + HOUR_MS, BEGIN + 3 * HOUR_MS]
        world.send("first", dues)
        whole = ask_pending(world)
        assert places(world) == (0, 4, 0)
        world.batch()
        assert places(world) == (0, 0, 4)
        assert ask_pending(world)["bytes"] == whole["bytes"]
        assert ask_pending(world)["times"] == whole["times"], "a row of the table counts as it did in the log"
        world.send("second", [BEGIN + 2 * HOUR_MS])
        assert places(world) == (0, 1, 4)
        world.cancel("first-u2", dues[2], "unique")  # the message is in the table, its cancel in the log
        assert places(world) == (0, 1, 3)
        world.batch()  # now both are in the table
        assert places(world) == (0, 0, 4)
        world.cancel("second-k0", BEGIN + 2 * HOUR_MS, "key")
        assert places(world) == (0, 0, 3)
        world.pass_minutes(4)
        assert places(world) == (2, 0, 1), "two are promoted"
        assert ask_pending(world, unit="hour")["times"][-1]["count"] == 1
        address = world.served.server.broker_address
        bars = admin.forecast(address, TOPIC, "minute", 60)["bars"]
        assert [(bar["rows"], bar["busiest_rows"]) for bar in bars if bar["rows"]] == [(2, 2)]
        assert [bar["rows"] for bar in admin.forecast(address, "", "hour", 4)["bars"]] == [2, 0, 0, 1]
        world.served.call(lambda: world.broker.delete_topic(TOPIC, world.clock.now_ms()))
        assert places(world) == (0, 0, 0), "nobody can consume them any more"
    finally:
        world.close()
