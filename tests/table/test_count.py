"""How much waits in real Delta tables, as a broker asks."""

from pathlib import Path
from typing import Any

import pytest

from postdate.counts import Counts, Seconds
from postdate.keys import key_hash
from postdate.table.find import TableReader
from postdate.table.format import DROP, own_arrival
from tests.support.helpers import TOPIC
from tests.support.table_rows import Row, append, row, signed


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
    append(tmp_path, *[row(1_000 * (n % 3 + 1) + n, n) for n in range(90)])
    append(tmp_path, row(9_000, 100), row(9_001, 101) | {"queue": 0}, row(9_002, 102) | {"queue": 7})
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
        return row(due, arrival, unique="A") if by == "unique" else row(due, arrival, keys="A x")

    append(
        tmp_path, named(5_000, 1), named(5_000, 2), row(5_000, 3, unique="B", keys="B"), named(5_001, 4),
        named(5_000, 5) | {"queue": 2}, named(5_000, 20),
    )  # fmt: skip
    asked = wish(names=[TOPIC, "other"], codes=[-1, 0, 1])
    assert sum(rows for _, rows, _ in counted(tmp_path, asked)) == 6
    if is_taken:
        append(tmp_path, row(5_000, 10, kind=2) | dict(zip(("unique_hash", "key_hash"), hashes, strict=True)))
    else:
        asked["cancels"] = [(5_000, 10, 0, *hashes, 0)]
    assert sum(rows for _, rows, _ in counted(tmp_path, asked)) == 4


def test_what_a_job_dropped_or_an_untaken_job_brought_does_not_count(tmp_path: Path) -> None:
    append(tmp_path, row(5_000, 1), row(5_000, 2), row(6_000, own_arrival(1)), row(6_000, own_arrival(2)))
    append(tmp_path, row(5_000, 2) | {"kind": DROP}, row(5_001, 1) | {"kind": DROP})
    assert counted(tmp_path, wish()) == [(5_000, 1, 100), (6_000, 2, 200)]
    assert counted(tmp_path, wish(untaken_jobs=[2])) == [(5_000, 1, 100), (6_000, 1, 100)]
