"""The table's point read, against real Delta tables; and the broker's question about it."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import CommitProperties, DeltaTable, Transaction, WriterProperties, write_deltalake

from postdate.clock import ManualClock
from postdate.contract import Stage
from postdate.counts import Counts, Seconds
from postdate.keys import key_hash
from postdate.message import LOOPBACK, Message, encode_properties, first_key
from postdate.storage import record as records
from postdate.table import find as tables
from postdate.table.find import Question, Table, TableUnreadable
from postdate.table.format import FAR, ROWS, SCHEMA
from postdate.wire import codes
from postdate.wire.frame import Command
from tests.support.bulking import bulking
from tests.support.dialogue import connected, make_topic, sent
from tests.support.helpers import DAY_MS, T0, TOPIC
from tests.support.serving import serving


def signed(number: int) -> int:
    return number - (1 << 64) if number >= 1 << 63 else number


Row = dict[str, Any]


def row(due: int, arrival: int, *, unique: str = "", keys: str = "", topic: str = TOPIC, kind: int = 1) -> Row:
    named = {name: value for name, value in (("UNIQ_KEY", unique), ("KEYS", keys)) if value}
    message = Message(topic, b"body", encode_properties(named))
    return {
        "due": due, "arrival": arrival, "kind": kind, "topic": topic, "queue": 1, "level": 0, "tag_hash": 0,
        "unique_hash": signed(key_hash(unique)), "key_hash": signed(key_hash(first_key(keys))), "flags": 0,
        "key": keys or None, "tag": None, "size": 100,
        "record": records.encode(message, topic.encode(), arrival, T0, LOOPBACK),
    }  # fmt: skip


def append(folder: Path, *rows: Row, taken: int = 0) -> None:
    """A file of the table, sorted, in row groups of 8 rows; the table says how many far rows it has taken."""
    ordered = sorted(rows, key=lambda each: (each["due"], each["arrival"]))
    write_deltalake(
        folder / "messages", pa.Table.from_pylist(ordered, SCHEMA), mode="append",
        writer_properties=WriterProperties(max_row_group_size=8),
        commit_properties=CommitProperties(app_transactions=[Transaction(FAR, taken), Transaction(ROWS, taken)]),
    )  # fmt: skip


def question(key: str, due: int, *, by: str = "unique", before: int = 1 << 60, topic: str = TOPIC) -> Question:
    return Question(topic, key, by, key_hash(key), due, before)


def test_a_message_is_found_by_its_keys_and_verified(tmp_path: Path) -> None:
    append(tmp_path, *[row(1_000 + n // 2, n, unique=f"U{n}", keys=f"K{n} other") for n in range(100)])
    append(tmp_path, row(1_010, 500, unique="U20"), row(1_010, 501, unique="U20"), row(1_011, 502, unique="U20"))
    append(tmp_path, row(1_010, 503, unique="U20", topic="others"), row(1_010, 504, unique="U20", kind=2))
    table = Table()
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
    append(tmp_path, row(1_000, 1, unique="A") | {"unique_hash": signed(key_hash("B"))}, row(1_000, 2, unique="B"))
    assert Table().find(str(tmp_path), question("B", 1_000)) == [2]


def test_statistics_spare_files_and_row_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for day in range(10):
        append(tmp_path, *[row(day * 1_000 + n, day * 1_000 + n, unique=f"U{day}-{n}") for n in range(100)])
    read: list[tuple[str, int]] = []

    class Counted(pq.ParquetFile):  # type: ignore[misc]  # pyarrow has no types
        def __init__(self, path: str, **how: Any) -> None:
            self.path = path
            super().__init__(path, **how)

        def read_row_group(self, group: int, columns: list[str]) -> pa.Table:
            read.append((self.path, group))
            return super().read_row_group(group, columns)

    monkeypatch.setattr(pq, "ParquetFile", Counted)
    assert Table().find(str(tmp_path), question("U3-50", 3_050)) == [3_050]
    assert len(set(read)) == 1, "one row group of one file"
    assert Table().find(str(tmp_path), question("U3-50", 3_500)) == []
    assert len(set(read)) == 1, "between two files no file is opened"


def test_a_table_that_changes_is_followed(tmp_path: Path) -> None:
    table = Table()
    append(tmp_path, row(1_000, 1, unique="A"))
    assert table.find(str(tmp_path), question("A", 1_000)) == [1]
    append(tmp_path, row(1_000, 2, unique="A"))
    assert table.find(str(tmp_path), question("A", 1_000)) == [1, 2]
    DeltaTable(tmp_path / "messages").delete("arrival = 1")
    assert table.find(str(tmp_path), question("A", 1_000)) == [2]
    other = tmp_path / "other"
    append(other, row(1_000, 3, unique="A"))
    assert table.find(str(other), question("A", 1_000)) == [3]
    assert table.find(str(tmp_path), question("A", 1_000)) == [2]
    shutil.rmtree(tmp_path / "messages")
    with pytest.raises(TableUnreadable):
        table.find(str(tmp_path), question("A", 1_000))
    append(tmp_path, row(1_000, 4, unique="A"))
    assert table.find(str(tmp_path), question("A", 1_000)) == [4], "a table made anew is another one"


def test_a_file_that_goes_between_two_looks_is_looked_for_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when a merge or a promotion commits while the question is answered."""
    append(tmp_path, row(1_000, 1, unique="A"))
    real, merges = tables._chosen, iter([True])

    def merged_meanwhile(files: pa.Table, asked: Question) -> list[str]:
        chosen = real(files, asked)
        if next(merges, False):
            delta = DeltaTable(tmp_path / "messages")
            write_deltalake(delta, pa.Table.from_pylist([row(1_000, 1, unique="A")], SCHEMA), mode="overwrite")
            for path in chosen:
                (tmp_path / "messages" / path).unlink()
        return chosen

    monkeypatch.setattr(tables, "_chosen", merged_meanwhile)
    assert Table().find(str(tmp_path), question("A", 1_000)) == [1]


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
        Table().find(str(tmp_path), question("A", 1_000))


def _damage(folder: Path) -> None:
    append(folder, row(1_000, 1, unique="A"))
    for path in (folder / "messages").glob("*.parquet"):
        path.write_bytes(path.read_bytes()[:100])


def _lose(folder: Path) -> None:
    append(folder, row(1_000, 1, unique="A"))
    for path in (folder / "messages").glob("*.parquet"):
        path.unlink()


def test_without_a_table_nothing_can_be_said() -> None:
    with pytest.raises(TableUnreadable, match="no pipeline has said where its table is"):
        Table().find("", question("A", 1_000))


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
                return peer.ask(codes.RECALL_MESSAGE, topic=TOPIC, key=key, due=due)

            unread = cancelled("order-7")
            assert (unread.code, unread.fields["outcome"]) == (codes.ILLEGAL_OPERATION, "unknown")
            assert f"the table {uri} cannot be read" in (unread.remark or "")
            append(tmp_path / "table", *[each | {"flags": 0, "size": len(each["record"])} for each in far], taken=1)
            found = cancelled("order-7")
            assert (found.code, found.fields["outcome"]) == (codes.SUCCESS, "cancelled"), found.remark
            assert cancelled("order-8").fields["outcome"] == "unknown"


# -- counting ---------------------------------------------------------------------------------------------------


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
    counts = Table().count(str(folder), asked)
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
    seconds = Table().count(str(tmp_path), wish(from_ms=2_000, seconds=4))
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
