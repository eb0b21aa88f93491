"""Tasks of executors, run without Spark: promotion, merging, damage."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import flight

from postdate.arrival import NEVER, own_arrival
from postdate.errors import CorruptTable
from postdate.spark.executor import tasks
from postdate.storage.chunk import Chunk
from postdate.storage.disk import RealDisk
from postdate.table.delta import Table
from postdate.table.files import Window, read_window, write_file
from postdate.table.format import CANCEL, MOVE
from tests.support.bulk import bulking
from tests.support.server import serving
from tests.support.table_rows import arrivals, cancel_record, damage_cut, message_record, messages, row, table_of


@pytest.fixture
def table(tmp_path: Path) -> Table:
    return Table(str(tmp_path / "messages"))


@pytest.fixture(scope="module")
def bulk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """Where a task uploads to, and the data folder in which that ends."""
    folder = tmp_path_factory.mktemp("bulk")
    with serving(folder) as served, bulking(served, folder) as client:
        assert client.broker.register("", "").epoch == 1
        yield f"127.0.0.1:{client.port}", folder


def promoted(table: Table, bulk: tuple[str, Path], window: Window, *names: str) -> tuple[dict[str, Any], list[int]]:
    """Runs the task; returns what it says, and the arrivals in the chunk that it made."""
    address, folder = bulk
    task = {
        "table": table.folder.uri,
        "bulk": address,
        "epoch": 1,
        "window": list(window),
        "files": names,
        "untaken": [],
    }
    result = tasks.promote(task)
    if result["chunk"] is None:
        return result, []
    chunk = Chunk(RealDisk(folder), result["chunk"])
    chunk.verify()
    return result, chunk.index["arrival"].tolist()


def test_a_promotion_leaves_out_what_is_cancelled_and_keeps_the_order(table: Table, bulk: tuple[str, Path]) -> None:
    rows = table_of(
        row(20, 1, unique_hash=7, record=message_record(unique="u")),
        row(10, 5, key_hash=8, record=message_record(key="k")),
        row(10, 2),
        row(20, 9, unique_hash=7, record=message_record(unique="u")),  # the key is used again behind its cancel
        row(20, 6, kind=CANCEL, unique_hash=7, record=cancel_record("u", "unique", 20)),
        row(10, 7, kind=CANCEL, key_hash=8, record=cancel_record("k", "key", 10)),
        row(30, 3),
    )
    file, _ = write_file(table.folder, "soon-1.parquet", rows)
    result, found = promoted(table, bulk, Window(-1, 20), file.path)
    assert found == [2, 9]
    assert (result["read"], result["cancelled"], result["rows"]) == (6, 2, 2)


@pytest.mark.parametrize(
    "cancel",
    [
        row(10, 9, kind=CANCEL, unique_hash=7, record=cancel_record("other", "unique", 10)),
        row(10, 9, kind=CANCEL, unique_hash=7, topic="other", record=cancel_record("u", "unique", 10, "other")),
        row(11, 9, kind=CANCEL, unique_hash=7, record=cancel_record("u", "unique", 11)),
        row(10, 0, kind=CANCEL, unique_hash=7, record=cancel_record("u", "unique", 10)),
        row(10, 9, kind=CANCEL, key_hash=7, record=cancel_record("u", "key", 10)),
    ],
    ids=["equal hash, other key", "other topic", "other due", "came before", "other kind of key"],
)
def test_a_cancel_of_something_else_cancels_nothing(
    table: Table, bulk: tuple[str, Path], cancel: dict[str, Any]
) -> None:
    rows = table_of(row(10, 5, unique_hash=7, record=message_record(unique="u")), cancel)
    file, _ = write_file(table.folder, "soon-1.parquet", rows)
    result, found = promoted(table, bulk, Window(-1, 20), file.path)
    assert found == [5]
    assert result["cancelled"] == 0


def test_two_messages_of_one_hash_are_told_apart_by_their_records(table: Table, bulk: tuple[str, Path]) -> None:
    rows = table_of(
        *(row(10, n, key_hash=7, record=message_record(key=f"k{n}")) for n in range(4)),
        *(row(10, 10 + n, kind=CANCEL, key_hash=7, record=cancel_record(f"k{n}", "key", 10)) for n in (1, 3, 5)),
    )
    file, _ = write_file(table.folder, "soon-1.parquet", rows)
    assert promoted(table, bulk, Window(-1, 20), file.path)[1] == [0, 2]


def test_a_window_whose_messages_are_all_cancelled_makes_no_chunk(table: Table, bulk: tuple[str, Path]) -> None:
    rows = table_of(
        row(10, 1, unique_hash=7, record=message_record(unique="u")),
        row(10, 2, kind=CANCEL, unique_hash=7, record=cancel_record("u", "unique", 10)),
    )
    file, _ = write_file(table.folder, "soon-1.parquet", rows)
    result, found = promoted(table, bulk, Window(-1, 20), file.path)
    assert (result["chunk"], found, result["read"]) == (None, [], 2)


def test_parts_of_a_burst_count_every_row_once(table: Table, bulk: tuple[str, Path]) -> None:
    rows = table_of(
        *(row(10, n, unique_hash=n + 1, record=message_record(unique=f"u{n}")) for n in range(10)),
        *(
            row(10, 10 + n, kind=CANCEL, unique_hash=n + 1, record=cancel_record(f"u{n}", "unique", 10))
            for n in range(4)
        ),
    )
    file, _ = write_file(table.folder, "soon-1.parquet", rows)
    parts = [promoted(table, bulk, Window(9, 10, low, high), file.path) for low, high in ((0, 3), (3, 12), (12, NEVER))]
    assert [arrival for _, found in parts for arrival in found] == [4, 5, 6, 7, 8, 9]
    assert sum(result["read"] for result, _ in parts) == 14


def test_every_part_of_a_burst_sees_its_moves_and_one_counts_them(table: Table, bulk: tuple[str, Path]) -> None:
    rows = table_of(
        *(row(10, n) for n in range(10)),
        *(row(10, 11 + 2 * n, kind=MOVE, unique_hash=n) for n in range(4)),
        row(10, 21, kind=MOVE, unique_hash=own_arrival(1)), row(10, own_arrival(1)),
    )  # fmt: skip
    file, _ = write_file(table.folder, "soon-1.parquet", rows)
    parts = [promoted(table, bulk, Window(9, 10, low, high), file.path) for low, high in ((0, 3), (3, 14), (14, NEVER))]
    assert [arrival for _, found in parts for arrival in found] == [4, 5, 6, 7, 8, 9]
    assert sum(result["read"] for result, _ in parts) == 16
    assert sum(result["cancelled"] for result, _ in parts) == 5


def test_a_merge_writes_every_row_once_by_bucket(table: Table) -> None:
    rows = [row(due, due) for due in range(100)]
    rows += [row(50, 200, kind=CANCEL, unique_hash=7), row(50, 201, kind=MOVE, unique_hash=1)]
    names = [write_file(table.folder, f"soon-{n}.parquet", table_of(*rows[n::3])).file.path for n in range(3)]
    buckets = [("hour", 9, 49), ("hour", 49, 60), ("month", 60, 99)]
    parts = [Window(-1, 50, 0, 60), Window(-1, 50, 60, NEVER), Window(50, 99)]
    results = [
        tasks.merge({"table": table.folder.uri, "window": list(part), "files": names, "buckets": buckets})
        for part in parts
    ]
    assert sum(result["read"] for result in results) == 102
    paths = [file[0] for result in results for file, _ in result["files"]]
    assert {path.partition("-")[0] for path in paths} == {"hour", "month"}
    kept = read_window(table.folder, paths, Window(-1, NEVER))
    assert arrivals(kept) == [*range(10, 100), 200, 201], "what is due at or before the first bucket need not be kept"
    for path in paths:
        found = read_window(table.folder, [path], Window(-1, NEVER))
        order = list(zip(found.column("due").to_pylist(), found.column("arrival").to_pylist(), strict=True))
        assert order == sorted(order)


def test_damage_that_a_task_meets_reaches_the_driver_by_name(table: Table) -> None:
    file, _ = write_file(table.folder, "soon-1.parquet", messages(500))
    damage_cut(Path(table.folder.path(file.path)))
    task = {"files": [file.path], "window": [-1, NEVER], "buckets": []}
    answer = tasks.over_numbers(tasks.merge, {"table": table.folder.uri}, [task])
    (batch,) = answer(iter([pa.RecordBatch.from_pydict({"id": [0]})]))
    with pytest.raises(CorruptTable, match=r"soon-1.parquet"):
        tasks.read_results(batch.column(0).to_pylist())


@pytest.mark.parametrize(
    "error", [flight.FlightUnavailableError("connection refused"), flight.FlightTimedOutError("late")]
)
def test_a_bulk_that_is_away_reaches_the_driver_by_name(error: flight.FlightError) -> None:
    def work(_task: tasks.Task) -> tasks.Result:
        raise error

    (batch,) = tasks.over_numbers(work, {}, [{}])(iter([pa.RecordBatch.from_pydict({"id": [0]})]))
    with pytest.raises(tasks.BulkAway, match=f"bulk does not answer an executor: .*{error}"):
        tasks.read_results(batch.column(0).to_pylist())
