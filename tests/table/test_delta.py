"""The table without Spark: its files, the tasks that work on them, its Delta log; and what damage and crashes do."""

import json
import os
import random
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from postdate.errors import CorruptTable, Refused
from postdate.message import LOOPBACK, Message, encode_properties
from postdate.spark.executor import tasks
from postdate.spark.pipeline.history import History
from postdate.storage import record as records
from postdate.storage.chunk import Chunk
from postdate.storage.disk import RealDisk
from postdate.table import files
from postdate.table.delta import Table
from postdate.table.files import NEVER, Place, Window, Written, read_groups, read_window, sync_path, touches, write
from postdate.table.format import CANCEL, MESSAGE, ROW_GROUP_ROWS, SCHEMA, entry
from tests.support.bulking import bulking
from tests.support.serving import serving

TOPIC = "orders"


def message_record(unique: str = "", key: str = "", topic: str = TOPIC) -> bytes:
    properties = {"UNIQ_KEY": unique, "KEYS": key}
    text = encode_properties({name: value for name, value in properties.items() if value})
    return records.encode(Message(topic, b"body", text), topic.encode(), 0, 1, LOOPBACK)


def cancel_record(key: str, by: str, due: int, topic: str = TOPIC) -> bytes:
    body = json.dumps({"topic": topic, "key": key, "by": by, "due": due}).encode()
    return records.encode(Message("system", body), b"system", 0, 1, LOOPBACK)


RECORD = message_record()


def row(due: int, arrival: int, **changed: Any) -> dict[str, Any]:
    changed = {"record": RECORD} | changed
    return {
        "due": due, "arrival": arrival, "kind": MESSAGE, "topic": TOPIC, "queue": 1, "level": 0, "tag_hash": 0,
        "unique_hash": 0, "key_hash": 0, "flags": 0, "key": None, "tag": None, "size": len(changed["record"]),
        **changed,
    }  # fmt: skip


def table_of(*rows: dict[str, Any]) -> pa.Table:
    return pa.Table.from_pylist(sorted(rows, key=lambda each: (each["due"], each["arrival"])), SCHEMA)


def messages(count: int, due: int = 1_000, arrival: int = 0) -> pa.Table:
    return table_of(*(row(due + n, arrival + n) for n in range(count)))


def arrivals(found: pa.Table) -> list[int]:
    return sorted(found.column("arrival").to_pylist())


@pytest.fixture
def table(tmp_path: Path) -> Table:
    return Table(str(tmp_path / "messages"))


def added(table: Table, name: str, rows: pa.Table, far: int | None = None) -> Written:
    written = write(table.place, name, rows)
    total = table.rows + rows.num_rows if far is not None else None
    table.commit([written], far=far, rows=total)
    return written


# -- files ------------------------------------------------------------------------------------------------------


def test_a_file_says_what_it_holds(table: Table) -> None:
    file, groups = write(table.place, "soon-1.parquet", messages(ROW_GROUP_ROWS + 10, due=500, arrival=70))
    assert file.rows == ROW_GROUP_ROWS + 10
    assert (file.due_low, file.due_high) == (500, 500 + file.rows - 1)
    assert (file.arrival_low, file.arrival_high) == (70, 70 + file.rows - 1)
    assert file.bytes == os.path.getsize(table.place.path(file.path))
    assert file.tier == "soon"
    assert [group.rows for group in groups] == [ROW_GROUP_ROWS, 10]
    assert groups == read_groups(table.place, file.path)
    assert not any(group.has_cancels for group in groups)


@pytest.mark.parametrize(
    ("window", "wanted"),
    [
        (Window(-1, NEVER), {0, 1, 2, 3}),
        (Window(10, 20), {1}),
        (Window(9, 20), {0, 1}),
        (Window(10, 30, 2, 3), {2}),
        (Window(-1, 30, after=20), {2}),
        (Window(-1, 30, after=20, late_from=1), {1, 2}),
        (Window(-1, 30, after=30, late_from=2), {2}),
        (Window(-1, 9), set()),
    ],
    ids=str,
)
def test_a_window_is_read_exactly(table: Table, window: Window, wanted: set[int]) -> None:
    rows = table_of(*(row(due, arrival) for arrival, due in enumerate((10, 20, 30, 40))))
    file, _ = write(table.place, "soon-1.parquet", rows)
    assert set(arrivals(read_window(table.place, [file.path], window))) == wanted


def test_of_an_instant_that_is_split_by_arrival_every_part_sees_its_cancels(table: Table) -> None:
    rows = table_of(row(10, 1), row(10, 2), row(10, 3, kind=CANCEL), row(11, 4, kind=CANCEL))
    file, groups = write(table.place, "soon-1.parquet", rows)
    assert groups[0].has_cancels
    assert arrivals(read_window(table.place, [file.path], Window(9, 10, 0, 2))) == [1, 3]
    assert touches(groups[0], Window(9, 10, 100, 200)), "its messages came before, but its cancel may be for one behind"


def test_windows_of_random_files_together_give_every_row_once(table: Table) -> None:
    dice = random.Random(5)
    everything = [row(dice.randrange(100), arrival) for arrival in range(300)]
    names = [
        write(table.place, f"soon-{number}.parquet", table_of(*everything[number::7])).file.path for number in range(7)
    ]
    edges = [-1, *sorted(dice.sample(range(99), 5)), 99]
    found = [
        arrival
        for low, high in pairwise(edges)
        for arrival in arrivals(read_window(table.place, names, Window(low, high)))
    ]
    assert sorted(found) == list(range(300))


@pytest.mark.parametrize("limits", [(1, 1 << 30), (40, 1 << 30), (1 << 30, 4_000), (1 << 30, 1 << 30)], ids=str)
@pytest.mark.parametrize("span", [1, 10, 100])
def test_pieces_are_the_window_in_order_and_no_instant_is_cut(
    table: Table, monkeypatch: pytest.MonkeyPatch, limits: tuple[int, int], span: int
) -> None:
    """Files of several row groups each; all rows due at one instant in the extreme."""
    monkeypatch.setattr(files, "ROW_GROUP_ROWS", 5)
    monkeypatch.setattr(files, "_PIECE_ROWS", limits[0])
    monkeypatch.setattr(files, "_PIECE_BYTES", limits[1])
    dice = random.Random(span)
    everything = [row(dice.randrange(span), arrival) for arrival in range(300)]
    names = [write(table.place, f"soon-{n}.parquet", table_of(*everything[n::7])).file.path for n in range(7)]
    window = Window(-1, span // 2)
    wanted = sorted((each["due"], each["arrival"]) for each in everything if each["due"] <= span // 2)
    with files.Sorted(table.place, names, window) as rows:
        assert rows.count() == len(wanted)
        pieces = list(rows.pieces(["due", "arrival"]))
    pairs = [
        list(zip(*(piece.column(name).to_pylist() for name in ("due", "arrival")), strict=True)) for piece in pieces
    ]
    assert [pair for piece in pairs for pair in piece] == wanted
    assert all(left[-1][0] < right[0][0] for left, right in pairwise(pairs))
    if limits[0] == 1 and span > 1:
        assert len(pieces) > 1


def test_a_file_that_cannot_be_opened_closes_the_others(table: Table) -> None:
    file, _ = write(table.place, "soon-1.parquet", messages(3))
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(CorruptTable, match=r"soon-2\.parquet of the table"):
        files.Sorted(table.place, [file.path, "soon-2.parquet"], Window(-1, NEVER))
    assert len(os.listdir("/proc/self/fd")) == before


def damage_cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def damage_flipped(path: Path) -> None:
    """A bit of a page, not of the footer."""
    data = bytearray(path.read_bytes())
    data[len(data) // 4] ^= 16
    path.write_bytes(data)


def damage_gone(path: Path) -> None:
    path.unlink()


@pytest.mark.parametrize("spoil", [damage_cut, damage_flipped, damage_gone])
def test_a_damaged_file_is_named_and_says_what_to_do(table: Table, spoil: Callable[[Path], None]) -> None:
    rows = table_of(*(row(n, n, record=random.Random(n).randbytes(200)) for n in range(500)))
    file, _ = write(table.place, "soon-1.parquet", rows)
    spoil(Path(table.place.path(file.path)))
    with pytest.raises(CorruptTable, match=r"soon-1.parquet of the table .* cannot be read: .*Move it away"):
        read_window(table.place, [file.path], Window(-1, NEVER))
    task = {"files": [file.path], "window": [-1, NEVER], "buckets": []}
    answer = tasks.over_numbers(tasks.merge, {"table": table.place.uri}, [task])
    (batch,) = answer(iter([pa.RecordBatch.from_pydict({"id": [0]})]))
    with pytest.raises(CorruptTable, match=r"soon-1.parquet"):
        tasks.read_results(batch.column(0).to_pylist())


def test_every_sync_is_traced_where_that_is_asked_for(
    table: Table, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace = tmp_path / "trace"
    monkeypatch.setenv("POSTDATE_SYNC_TRACE", str(trace))
    file, _ = write(table.place, "soon-1.parquet", messages(3))
    sync_path(str(tmp_path))
    lines = [json.loads(line) for line in trace.read_text().splitlines()]
    assert [line["path"] for line in lines] == [table.place.path(file.path), table.place.base, str(tmp_path)]
    assert lines[0]["size"] == file.bytes
    assert file.path in lines[1]["names"]


# -- tasks ------------------------------------------------------------------------------------------------------


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
        "table": table.place.uri,
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
    file, _ = write(table.place, "soon-1.parquet", rows)
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
    file, _ = write(table.place, "soon-1.parquet", rows)
    result, found = promoted(table, bulk, Window(-1, 20), file.path)
    assert found == [5]
    assert result["cancelled"] == 0


def test_two_messages_of_one_hash_are_told_apart_by_their_records(table: Table, bulk: tuple[str, Path]) -> None:
    rows = table_of(
        *(row(10, n, key_hash=7, record=message_record(key=f"k{n}")) for n in range(4)),
        *(row(10, 10 + n, kind=CANCEL, key_hash=7, record=cancel_record(f"k{n}", "key", 10)) for n in (1, 3, 5)),
    )
    file, _ = write(table.place, "soon-1.parquet", rows)
    assert promoted(table, bulk, Window(-1, 20), file.path)[1] == [0, 2]


def test_a_window_whose_messages_are_all_cancelled_makes_no_chunk(table: Table, bulk: tuple[str, Path]) -> None:
    rows = table_of(
        row(10, 1, unique_hash=7, record=message_record(unique="u")),
        row(10, 2, kind=CANCEL, unique_hash=7, record=cancel_record("u", "unique", 10)),
    )
    file, _ = write(table.place, "soon-1.parquet", rows)
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
    file, _ = write(table.place, "soon-1.parquet", rows)
    parts = [promoted(table, bulk, Window(9, 10, low, high), file.path) for low, high in ((0, 3), (3, 12), (12, NEVER))]
    assert [arrival for _, found in parts for arrival in found] == [4, 5, 6, 7, 8, 9]
    assert sum(result["read"] for result, _ in parts) == 14


def test_a_merge_writes_every_row_once_by_bucket(table: Table) -> None:
    rows = [row(due, due) for due in range(100)]
    rows += [row(50, 200, kind=CANCEL, unique_hash=7)]
    names = [write(table.place, f"soon-{n}.parquet", table_of(*rows[n::3])).file.path for n in range(3)]
    buckets = [("hour", 9, 49), ("hour", 49, 60), ("month", 60, 99)]
    parts = [Window(-1, 50, 0, 60), Window(-1, 50, 60, NEVER), Window(50, 99)]
    results = [
        tasks.merge({"table": table.place.uri, "window": list(part), "files": names, "buckets": buckets})
        for part in parts
    ]
    assert sum(result["read"] for result in results) == 101
    paths = [file[0] for result in results for file, _ in result["files"]]
    assert {path.partition("-")[0] for path in paths} == {"hour", "month"}
    kept = read_window(table.place, paths, Window(-1, NEVER))
    assert arrivals(kept) == [*range(10, 100), 200], "what is due at or before the first bucket need not be kept"
    for path in paths:
        found = read_window(table.place, [path], Window(-1, NEVER))
        order = list(zip(found.column("due").to_pylist(), found.column("arrival").to_pylist(), strict=True))
        assert order == sorted(order)


# -- the Delta log ----------------------------------------------------------------------------------------------


def test_a_table_knows_its_place_and_its_files(table: Table) -> None:
    one = added(table, "soon-1.parquet", messages(10), far=10)
    two = added(table, "soon-2.parquet", messages(5, due=9_000, arrival=50), far=17)
    for seen in (table, Table(table.place.uri)):
        assert (seen.far, seen.rows) == (17, 15)
        assert seen.files == {file.path: file for file, _ in (one, two)}
        assert seen.touched(Window(8_000, NEVER)) == [two.file]
        assert seen.groups("soon-1.parquet") == one.groups
        assert seen.missing() == []
        assert seen.bytes == one.file.bytes + two.file.bytes
    table.commit(removed=[one.file])
    assert list(Table(table.place.uri).files) == ["soon-2.parquet"]
    assert Table(table.place.uri).far == 17, "a commit that takes nothing in leaves the place as it is"


def test_of_two_writers_the_second_is_refused(table: Table) -> None:
    other = Table(table.place.uri)
    added(table, "soon-1.parquet", messages(1), far=1)
    with pytest.raises(Refused, match=r"version 1 of the table .* exists: another writer lives"):
        added(other, "soon-2.parquet", messages(1), far=1)
    assert list(Table(table.place.uri).files) == ["soon-1.parquet"]
    other.refresh()
    assert (other.far, list(other.files)) == (1, ["soon-1.parquet"])


@pytest.mark.parametrize("spoil", [damage_cut, damage_gone])
def test_files_that_are_missing_or_cut_are_found(table: Table, spoil: Callable[[Path], None]) -> None:
    written = added(table, "soon-1.parquet", messages(10), far=10)
    added(table, "soon-2.parquet", messages(10), far=20)
    spoil(Path(table.place.path("soon-1.parquet")))
    assert table.missing() == [written.file]


def log_of(table: Table) -> Path:
    return Path(table.place.path("_delta_log"))


def test_an_entry_that_is_cut_anywhere_does_not_count(table: Table) -> None:
    """At every byte: between two lines it is still good JSON, with files and without the place, or the other way."""
    added(table, "soon-1.parquet", messages(10), far=10)
    first = added(table, "soon-2.parquet", messages(5), far=15).file
    path = Path(table.place.path(entry(2)))
    whole = path.read_bytes()
    for size in [0, *range(1, len(whole), 37), *(n for n, byte in enumerate(whole) if byte == 10)]:
        path.write_bytes(whole[:size])
        again = Table(table.place.uri)
        assert (again.far, list(again.files), again.torn) == (10, ["soon-1.parquet"], [path.name]), size
        path.with_name(f"{path.name}.torn").unlink()
    path.write_bytes(bytes(len(whole)))
    assert Table(table.place.uri).far == 10
    path.write_bytes(whole)
    again = Table(table.place.uri)
    assert (again.far, again.torn) == (15, [])
    assert first.path in again.files


def test_a_table_whose_first_entry_is_cut_is_made_again(tmp_path: Path) -> None:
    path = Path(Table(str(tmp_path / "messages")).place.path(entry(0)))
    whole = path.read_bytes()
    for size in (0, 20, whole.index(b"\n"), len(whole) - 3):
        path.write_bytes(whole[:size])
        again = Table(str(tmp_path / "messages"))
        assert again.torn == [path.name]
        added(again, "soon-1.parquet", messages(10), far=10)
        assert Table(str(tmp_path / "messages")).far == 10
        Path(again.place.path(entry(1))).unlink()
        path.write_bytes(whole)


def test_an_entry_in_the_middle_that_is_damaged_is_an_error(table: Table) -> None:
    for number in range(3):
        added(table, f"soon-{number}.parquet", messages(10), far=10 * number + 10)
    path = Path(table.place.path(entry(2)))
    path.write_bytes(path.read_bytes()[:-30])
    with pytest.raises(CorruptTable, match="cannot be opened"):
        Table(table.place.uri)


def test_what_removing_old_files_notes_in_the_log_may_be_torn(table: Table) -> None:
    added(table, "soon-1.parquet", messages(10), far=10)
    table.commit(removed=list(table.files.values()))
    table.remove_old_files(retention_hours=0)
    notes = sorted(log_of(table).glob("*.json"))[3:]
    assert len(notes) == 2, "it notes its begin and its end"
    texts = [path.read_bytes() for path in notes]
    for first, second in ((b"", texts[1]), (None, texts[1]), (texts[0], b"{"), (b"", None), (texts[0], None)):
        for path, text in zip(notes, (first, second), strict=True):
            path.unlink(missing_ok=True)
            if text is not None:
                path.write_bytes(text)
        again = Table(table.place.uri)
        assert (again.far, again.rows) == (10, 10)
        for path in log_of(table).glob("*.torn"):
            path.unlink()


def test_a_tidy_table_is_as_good_without_its_old_entries(table: Table) -> None:
    for number in range(100):
        assert not table.tidy()
        added(table, f"soon-{number}.parquet", messages(1, arrival=number), far=number + 1)
    old = time.time() - 7_200
    for path in log_of(table).glob("*.json"):
        os.utime(path, (old, old))
    assert table.tidy()
    assert len(list(log_of(table).glob("*.json"))) < 10
    added(table, "soon-after.parquet", messages(1), far=101)
    again = Table(table.place.uri)
    assert (again.far, again.rows, len(again.files)) == (101, 101, 101)


@pytest.mark.parametrize("spoil", [damage_cut, damage_gone, lambda path: path.write_bytes(b"")])
@pytest.mark.parametrize("has_hint", [True, False])
def test_a_checkpoint_of_the_log_that_is_torn_is_not_needed(
    table: Table, spoil: Callable[[Path], None], has_hint: bool
) -> None:
    """It is written and then synced; only then are the entries removed that it stands for."""
    added(table, "soon-1.parquet", messages(10), far=10)
    table._delta.create_checkpoint()
    added(table, "soon-2.parquet", messages(10), far=20)
    (checkpoint,) = log_of(table).glob("*.checkpoint.parquet")
    spoil(checkpoint)
    if not has_hint:
        (log_of(table) / "_last_checkpoint").unlink()
    again = Table(table.place.uri)
    assert (again.far, sorted(again.files)) == (20, ["soon-1.parquet", "soon-2.parquet"])
    added(again, "soon-3.parquet", messages(10), far=30)
    assert Table(table.place.uri).far == 30


def test_files_that_nothing_names_are_removed_when_they_are_old(table: Table) -> None:
    """A task that fails leaves one; one that a batch writes just now is none of them."""
    for name in ("soon-old.parquet", "soon-new.parquet"):
        write(table.place, name, messages(3))
    os.utime(table.place.path("soon-old.parquet"), (time.time() - 7_200,) * 2)
    added(table, "soon-1.parquet", messages(3), far=3)
    table.remove_old_files()
    found = {path.name for path in Path(table.place.base).glob("*.parquet")}
    assert found == {"soon-new.parquet", "soon-1.parquet"}
    added(table, "soon-2.parquet", messages(3), far=6)


def test_a_table_has_a_place_by_uri_too(tmp_path: Path) -> None:
    table = Table(f"file://{tmp_path}/messages")
    added(table, "soon-1.parquet", messages(3), far=3)
    assert Table(str(tmp_path / "messages")).far == 3
    assert Place(f"file://{tmp_path}/messages").is_local


# -- history ----------------------------------------------------------------------------------------------------


def test_a_history_that_a_power_loss_has_spoilt_is_begun_anew(tmp_path: Path) -> None:
    folder = tmp_path / "history"
    history = History(str(folder))
    for number in range(3):
        history.append({"at_ms": number, "batch": number})
    assert [row["batch"] for row in History(str(folder)).last(2)] == [1, 2]
    newest = sorted((folder / "_delta_log").glob("*.json"))[-1]
    newest.write_bytes(b'{"add"')
    assert History(str(folder)).last(2) == []
    history = History(str(folder))
    history.append({"at_ms": 7, "batch": 7})
    assert [row["batch"] for row in history.last(5)] == [7]
