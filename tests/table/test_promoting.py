"""Planning and reading a promotion, as Spark's executors and bulk do it."""

from pathlib import Path

import pytest

from postdate.errors import CorruptTable
from postdate.table.delta import Table
from postdate.table.files import Slice, Window, write_file
from postdate.table.format import CANCEL, CHUNK_COLUMNS, name_taken_in
from postdate.table.promoting import DueRows, name_chunk
from postdate.table.slices import Limits, plan_promotion
from tests.support.table_rows import cancel_record, damage_cut, message_record, messages, row, table_of


@pytest.fixture
def table(tmp_path: Path) -> Table:
    table = Table(str(tmp_path / "messages"))
    table.commit(
        [
            write_file(table.folder, "hour-00000000000000000000-a.parquet", messages(100)),
            write_file(table.folder, "soon-00000000000000000005-b.parquet", messages(10, due=1_000, arrival=500)),
            write_file(table.folder, "soon-00000000000000000007-c.parquet", messages(10, due=1_000, arrival=700)),
        ]
    )
    return table


def read(table: Table, parts: list[Slice]) -> list[int]:
    found: list[int] = []
    for part in parts:
        with DueRows(table.folder, part) as rows:
            pieces = list(rows.pieces())
            assert rows.count == rows.rows == sum(piece.num_rows for piece in pieces)
            found += [arrival for piece in pieces for arrival in piece["arrival"].to_pylist()]
    return found


def test_a_promotion_reads_what_is_due_of_taken_files_and_all_that_is_due_of_untaken_ones(table: Table) -> None:
    window = Window(-1, 1_010, after=1_005)
    parts = plan_promotion(table.files.values(), table.row_groups, window, taken=7)
    assert sorted(read(table, parts)) == [*range(6, 11), *range(506, 510), *range(700, 710)]
    taken = [file for file in table.files.values() if not file.is_untaken(7)]
    parts = plan_promotion(taken, table.row_groups, window, taken=7)
    assert sorted(read(table, parts)) == [*range(6, 11), *range(506, 510)]


def test_slices_hold_every_row_once_in_order_of_due(table: Table) -> None:
    files = [file for file in table.files.values() if file.path.startswith("hour")]
    parts = plan_promotion(files, table.row_groups, Window(-1, 5_000), taken=0, limits=Limits(rows=30))
    assert len(parts) > 2
    assert read(table, parts) == list(range(100))


def test_a_cancelled_message_counts_as_read_and_is_left_out(table: Table) -> None:
    rows = table_of(
        row(20, 1, unique_hash=7, record=message_record(unique="u")),
        row(20, 2, unique_hash=7, record=message_record(unique="another key of the same hash")),
        row(20, 6, kind=CANCEL, unique_hash=7, record=cancel_record("u", "unique", 20)),
    )
    file, _ = write_file(table.folder, "soon-1.parquet", rows)
    with DueRows(table.folder, Slice(Window(-1, 20), [file.path], [])) as due:
        pieces = list(due.pieces())
        assert pieces[0].column_names == CHUNK_COLUMNS
        assert pieces[0]["arrival"].to_pylist() == [2]
        assert (due.read, due.cancelled, due.rows, due.count) == (3, 1, 1, 1)


def test_a_damaged_file_is_named(table: Table) -> None:
    path = next(iter(table.files))
    damage_cut(Path(table.folder.path(path)))
    with pytest.raises(CorruptTable, match=path):
        DueRows(table.folder, Slice(Window(-1, 5_000), [path], []))


def test_a_file_beside_the_table_has_one_name_when_it_is_taken_in() -> None:
    name = name_taken_in("_import-x-later-1.parquet", 12)
    assert name == name_taken_in("_import-x-later-1.parquet", 12)
    assert name.startswith("later-00000000000000000012-")
    assert name_taken_in("_job-00000001-soon-1.parquet", 12).startswith("soon-")
    assert name_taken_in("_job-00000001.parquet", 12).startswith("soon-")


def test_chunks_have_names_of_their_own() -> None:
    assert name_chunk(7) != name_chunk(7)
    assert name_chunk(7).startswith("000007-")
