"""The Delta table: its place in the far queue, its one writer; and what damage and crashes do to its log."""

import os
import time
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from deltalake import DeltaTable

from postdate.arrival import NEVER
from postdate.errors import CorruptTable, Refused
from postdate.table.delta import Table
from postdate.table.files import TableFolder, Window, WrittenFile, touches, write_file
from postdate.table.format import entry_path
from tests.support.core import HOUR_MS
from tests.support.pipeline import World
from tests.support.table_rows import damage_cut, damage_gone, messages


@pytest.fixture
def table(tmp_path: Path) -> Table:
    return Table(str(tmp_path / "messages"))


def added(table: Table, name: str, rows: pa.Table, far: int | None = None) -> WrittenFile:
    written = write_file(table.folder, name, rows)
    total = table.rows + rows.num_rows if far is not None else None
    table.commit([written], far=far, rows=total)
    return written


def test_a_table_knows_its_place_and_its_files(table: Table) -> None:
    one = added(table, "soon-1.parquet", messages(10), far=10)
    two = added(table, "soon-2.parquet", messages(5, due=9_000, arrival=50), far=17)
    for seen in (table, Table(table.folder.uri)):
        assert (seen.far, seen.rows) == (17, 15)
        assert seen.files == {file.path: file for file, _ in (one, two)}
        assert [file for file in seen.files.values() if touches(file, Window(8_000, NEVER))] == [two.file]
        assert seen.row_groups("soon-1.parquet") == one.groups
        assert seen.missing_files() == []
        assert seen.bytes == one.file.bytes + two.file.bytes
    table.commit(removed=[one.file])
    assert list(Table(table.folder.uri).files) == ["soon-2.parquet"]
    assert Table(table.folder.uri).far == 17, "a commit that takes nothing in leaves the place as it is"


def test_of_two_writers_the_second_is_refused(table: Table) -> None:
    other = Table(table.folder.uri)
    added(table, "soon-1.parquet", messages(1), far=1)
    with pytest.raises(Refused, match=r"version 1 of the table .* exists: another writer is at work"):
        added(other, "soon-2.parquet", messages(1), far=1)
    assert list(Table(table.folder.uri).files) == ["soon-1.parquet"]
    other.refresh()
    assert (other.far, list(other.files)) == (1, ["soon-1.parquet"])


@pytest.mark.parametrize("spoil", [damage_cut, damage_gone])
def test_files_that_are_missing_or_cut_are_found(table: Table, spoil: Callable[[Path], None]) -> None:
    written = added(table, "soon-1.parquet", messages(10), far=10)
    added(table, "soon-2.parquet", messages(10), far=20)
    spoil(Path(table.folder.path("soon-1.parquet")))
    assert table.missing_files() == [written.file]


def log_of(table: Table) -> Path:
    return Path(table.folder.path("_delta_log"))


def test_an_entry_that_is_cut_anywhere_does_not_count(table: Table) -> None:
    """At every byte: between two lines it is still good JSON, with files and without the place, or the other way."""
    added(table, "soon-1.parquet", messages(10), far=10)
    first = added(table, "soon-2.parquet", messages(5), far=15).file
    path = Path(table.folder.path(entry_path(2)))
    whole = path.read_bytes()
    for size in [0, *range(1, len(whole), 37), *(n for n, byte in enumerate(whole) if byte == 10)]:
        path.write_bytes(whole[:size])
        again = Table(table.folder.uri)
        assert (again.far, list(again.files), again.torn) == (10, ["soon-1.parquet"], [path.name]), size
        path.with_name(f"{path.name}.torn").unlink()
    path.write_bytes(bytes(len(whole)))
    assert Table(table.folder.uri).far == 10
    path.write_bytes(whole)
    again = Table(table.folder.uri)
    assert (again.far, again.torn) == (15, [])
    assert first.path in again.files


def test_a_table_whose_first_entry_is_cut_is_made_again(tmp_path: Path) -> None:
    path = Path(Table(str(tmp_path / "messages")).folder.path(entry_path(0)))
    whole = path.read_bytes()
    for size in (0, 20, whole.index(b"\n"), len(whole) - 3):
        path.write_bytes(whole[:size])
        again = Table(str(tmp_path / "messages"))
        assert again.torn == [path.name]
        added(again, "soon-1.parquet", messages(10), far=10)
        assert Table(str(tmp_path / "messages")).far == 10
        Path(again.folder.path(entry_path(1))).unlink()
        path.write_bytes(whole)


def test_an_entry_in_the_middle_that_is_damaged_is_an_error(table: Table) -> None:
    for number in range(3):
        added(table, f"soon-{number}.parquet", messages(10), far=10 * number + 10)
    path = Path(table.folder.path(entry_path(2)))
    path.write_bytes(path.read_bytes()[:-30])
    with pytest.raises(CorruptTable, match="cannot be opened"):
        Table(table.folder.uri)


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
        again = Table(table.folder.uri)
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
    again = Table(table.folder.uri)
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
    again = Table(table.folder.uri)
    assert (again.far, sorted(again.files)) == (20, ["soon-1.parquet", "soon-2.parquet"])
    added(again, "soon-3.parquet", messages(10), far=30)
    assert Table(table.folder.uri).far == 30


def test_files_that_nothing_names_are_removed_when_they_are_old(table: Table) -> None:
    """A task that fails leaves one; one that a batch writes just now is none of them."""
    for name in ("soon-old.parquet", "soon-new.parquet"):
        write_file(table.folder, name, messages(3))
    os.utime(table.folder.path("soon-old.parquet"), (time.time() - 7_200,) * 2)
    added(table, "soon-1.parquet", messages(3), far=3)
    table.remove_old_files()
    found = {path.name for path in Path(table.folder.base).glob("*.parquet")}
    assert found == {"soon-new.parquet", "soon-1.parquet"}
    added(table, "soon-2.parquet", messages(3), far=6)


def test_a_table_has_a_place_by_uri_too(tmp_path: Path) -> None:
    table = Table(f"file://{tmp_path}/messages")
    added(table, "soon-1.parquet", messages(3), far=3)
    assert Table(str(tmp_path / "messages")).far == 3
    assert TableFolder(f"file://{tmp_path}/messages").is_local


def test_a_filter_by_any_column_finds_its_rows(tmp_path: Path) -> None:
    """The Delta log has statistics of two columns; a reader must not believe that the others are empty."""
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
