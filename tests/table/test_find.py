"""Messages of one key and due, found in real Delta tables; and the broker's question about them."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, write_deltalake

from postdate.clock import ManualClock
from postdate.contract import Stage
from postdate.keys import key_hash
from postdate.table import find as tables
from postdate.table.find import Question, TableReader, TableUnreadable
from postdate.table.format import SCHEMA
from postdate.wire import codes
from postdate.wire.frame import Command
from postdate.wire.requests import Request
from tests.support.bulk import bulking
from tests.support.core import DAY_MS, T0, TOPIC
from tests.support.peer import connected, make_topic, sent
from tests.support.server import serving
from tests.support.table_rows import append, keyed_row, signed


def question(
    key: str, due: int, *, by: str = "unique", before: int = 1 << 60, topic: str = TOPIC, queues: tuple[int, ...] = (1,)
) -> Question:
    return Question(topic, key, by, key_hash(key), due, before, queues)


def test_a_message_is_found_by_its_keys_and_verified(tmp_path: Path) -> None:
    append(tmp_path, *[keyed_row(1_000 + n // 2, n, unique=f"U{n}", keys=f"K{n} other") for n in range(100)])
    append(
        tmp_path,
        keyed_row(1_010, 500, unique="U20"),
        keyed_row(1_010, 501, unique="U20"),
        keyed_row(1_011, 502, unique="U20"),
    )
    append(tmp_path, keyed_row(1_010, 503, unique="U20", topic="others"), keyed_row(1_010, 504, unique="U20", kind=2))
    table = TableReader()
    uri = str(tmp_path)
    assert table.find(uri, question("U20", 1_010)) == [20, 500, 501]
    assert table.find(uri, question("U20", 1_010, before=501)) == [20, 500]
    assert table.find(uri, question("U20", 1_011)) == [502]
    assert table.find(uri, question("U20", 1_010, topic="others")) == [503]
    assert table.find(uri, question("K20", 1_010, by="key")) == [20]
    assert table.find(uri, question("other", 1_010, by="key")) == [], "only the first of KEYS is a name for a cancel"
    assert table.find(uri, question("U21", 1_011)) == []
    assert table.find(uri, question("nobody", 1_010)) == []


def test_equal_hashes_are_told_apart_by_the_record(tmp_path: Path) -> None:
    append(
        tmp_path,
        keyed_row(1_000, 1, unique="A") | {"unique_hash": signed(key_hash("B"))},
        keyed_row(1_000, 2, unique="B"),
    )
    assert TableReader().find(str(tmp_path), question("B", 1_000)) == [2]


def test_rows_of_a_deleted_topic_of_that_name_are_not_found(tmp_path: Path) -> None:
    append(tmp_path, keyed_row(1_000, 1, unique="A"), keyed_row(1_000, 2, unique="A") | {"queue": 9})
    assert TableReader().find(str(tmp_path), question("A", 1_000, queues=(8, 9))) == [2]
    assert TableReader().find(str(tmp_path), question("A", 1_000, queues=())) == []


def test_statistics_spare_files_and_row_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for day in range(10):
        append(tmp_path, *[keyed_row(day * 1_000 + n, day * 1_000 + n, unique=f"U{day}-{n}") for n in range(100)])
    read: list[tuple[str, int]] = []

    class Counted(pq.ParquetFile):  # type: ignore[misc]  # pyarrow has no types
        def __init__(self, path: str, **how: Any) -> None:
            self.path = path
            super().__init__(path, **how)

        def read_row_group(self, group: int, columns: list[str]) -> pa.Table:
            read.append((self.path, group))
            return super().read_row_group(group, columns)

    monkeypatch.setattr(pq, "ParquetFile", Counted)
    assert TableReader().find(str(tmp_path), question("U3-50", 3_050)) == [3_050]
    assert len(set(read)) == 1, "one row group of one file"
    assert TableReader().find(str(tmp_path), question("U3-50", 3_500)) == []
    assert len(set(read)) == 1, "between two files no file is opened"


def test_a_table_that_changes_is_followed(tmp_path: Path) -> None:
    table = TableReader()
    append(tmp_path, keyed_row(1_000, 1, unique="A"))
    assert table.find(str(tmp_path), question("A", 1_000)) == [1]
    append(tmp_path, keyed_row(1_000, 2, unique="A"))
    assert table.find(str(tmp_path), question("A", 1_000)) == [1, 2]
    DeltaTable(tmp_path / "messages").delete("arrival = 1")
    assert table.find(str(tmp_path), question("A", 1_000)) == [2]
    other = tmp_path / "other"
    append(other, keyed_row(1_000, 3, unique="A"))
    assert table.find(str(other), question("A", 1_000)) == [3]
    assert table.find(str(tmp_path), question("A", 1_000)) == [2]
    shutil.rmtree(tmp_path / "messages")
    with pytest.raises(TableUnreadable):
        table.find(str(tmp_path), question("A", 1_000))
    append(tmp_path, keyed_row(1_000, 4, unique="A"))
    assert table.find(str(tmp_path), question("A", 1_000)) == [4], "a new table in the same place is another one"


def test_a_file_that_goes_between_two_looks_is_looked_for_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when a merge or a promotion commits while the question is answered."""
    append(tmp_path, keyed_row(1_000, 1, unique="A"))
    real, merges = tables._choose_files, iter([True])

    def merged_meanwhile(files: pa.Table, due: int) -> list[str]:
        chosen = real(files, due)
        if next(merges, False):
            delta = DeltaTable(tmp_path / "messages")
            write_deltalake(delta, pa.Table.from_pylist([keyed_row(1_000, 1, unique="A")], SCHEMA), mode="overwrite")
            for path in chosen:
                (tmp_path / "messages" / path).unlink()
        return chosen

    monkeypatch.setattr(tables, "_choose_files", merged_meanwhile)
    assert TableReader().find(str(tmp_path), question("A", 1_000)) == [1]


@pytest.mark.parametrize(
    ("prepare", "said"),
    [
        (lambda _: None, "cannot be read"),
        (lambda folder: (folder / "messages").mkdir(), "cannot be read"),
        (lambda folder: _damage(folder), "cannot be read"),
        (lambda folder: _lose(folder), "changes faster than it can be read"),
    ],
)
def test_a_table_that_cannot_be_read_is_no_empty_answer(
    tmp_path: Path, prepare: Callable[[Path], None], said: str
) -> None:
    prepare(tmp_path)
    with pytest.raises(TableUnreadable, match=said):
        TableReader().find(str(tmp_path), question("A", 1_000))


def _damage(folder: Path) -> None:
    append(folder, keyed_row(1_000, 1, unique="A"))
    for path in (folder / "messages").glob("*.parquet"):
        path.write_bytes(path.read_bytes()[:100])


def _lose(folder: Path) -> None:
    append(folder, keyed_row(1_000, 1, unique="A"))
    for path in (folder / "messages").glob("*.parquet"):
        path.unlink()


def test_without_a_table_nothing_can_be_said() -> None:
    with pytest.raises(TableUnreadable, match="no pipeline has said where its table is"):
        TableReader().find("", question("A", 1_000))


def test_a_cancel_finds_its_message_in_the_table(tmp_path: Path) -> None:
    """The message is taken and not promoted: only the table has it. The broker asks bulk, bulk asks the table."""
    due = T0 + DAY_MS
    with serving(tmp_path / "data", ManualClock(T0)) as served, connected(served) as peer:
        make_topic(peer, TOPIC)
        sent(peer, TOPIC, "hello", KEYS="order-7", TIMER_DELIVER_MS=due)
        with bulking(served, tmp_path / "data") as client:
            uri = str(tmp_path / "table")
            epoch = client.broker.register(uri, "local").epoch
            far = client.read().to_pylist()
            client.broker.stage(Stage(epoch, (0, 1), (0, T0 + 120_000), (), 1, 0))

            def cancelled(key: str) -> Command:
                return peer.ask(Request.RECALL_MESSAGE, topic=TOPIC, key=key, due=due)

            unread = cancelled("order-7")
            assert (unread.code, unread.fields["outcome"]) == (codes.ILLEGAL_OPERATION, "unknown")
            assert f"the table {uri} cannot be read" in (unread.remark or "")
            append(tmp_path / "table", *[each | {"flags": 0, "size": len(each["record"])} for each in far], taken=1)
            found = cancelled("order-7")
            assert (found.code, found.fields["outcome"]) == (codes.SUCCESS, "cancelled"), found.remark
            assert cancelled("order-8").fields["outcome"] == "unknown"


def test_the_delta_log_is_read_again_only_where_it_has_a_new_entry(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    append(tmp_path, keyed_row(1_000, 1, unique="A"))
    reader, update, updates = TableReader(), DeltaTable.update_incremental, list[int]()

    def counted(table: DeltaTable) -> None:
        updates.append(table.version())
        update(table)

    monkeypatch.setattr(DeltaTable, "update_incremental", counted)
    for _ in range(3):
        assert reader.find(str(tmp_path), question("A", 1_000)) == [1]
    assert len(updates) == 1
    append(tmp_path, keyed_row(1_000, 2, unique="A"))
    updates.clear()
    for _ in range(3):
        assert reader.find(str(tmp_path), question("A", 1_000)) == [1, 2]
    assert len(updates) == 1
