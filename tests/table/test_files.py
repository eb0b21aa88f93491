"""Files of the table: a window is read exactly out of any files, and damage is named."""

import json
import os
import random
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest

from postdate.arrival import NEVER, OWN
from postdate.errors import CorruptTable
from postdate.table import files
from postdate.table.delta import Table
from postdate.table.files import Window, find_beside, read_row_groups, read_window, sync_path, touches, write_file
from postdate.table.format import CANCEL, ROW_GROUP_ROWS, name_taken_in
from postdate.table.keys import name_index
from tests.support.table_rows import arrivals, damage_cut, damage_flipped, damage_gone, messages, row, table_of


@pytest.fixture
def table(tmp_path: Path) -> Table:
    return Table(str(tmp_path / "messages"))


def test_a_file_says_what_it_holds(table: Table) -> None:
    file, groups = write_file(table.folder, "soon-1.parquet", messages(ROW_GROUP_ROWS + 10, due=500, arrival=70))
    assert file.rows == ROW_GROUP_ROWS + 10
    assert (file.due_low, file.due_high) == (500, 500 + file.rows - 1)
    assert (file.arrival_low, file.arrival_high) == (70, 70 + file.rows - 1)
    assert file.bytes == os.path.getsize(table.folder.path(file.path))
    assert file.tier == "soon"
    assert [group.rows for group in groups] == [ROW_GROUP_ROWS, 10]
    assert groups == read_row_groups(table.folder, file.path)
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
    file, _ = write_file(table.folder, "soon-1.parquet", rows)
    assert set(arrivals(read_window(table.folder, [file.path], window))) == wanted


def test_of_an_instant_that_is_split_by_arrival_every_part_sees_its_cancels(table: Table) -> None:
    rows = table_of(row(10, 1), row(10, 2), row(10, 3, kind=CANCEL), row(11, 4, kind=CANCEL))
    file, groups = write_file(table.folder, "soon-1.parquet", rows)
    assert groups[0].has_cancels
    assert arrivals(read_window(table.folder, [file.path], Window(9, 10, 0, 2))) == [1, 3]
    assert touches(groups[0], Window(9, 10, 100, 200)), (
        "its messages came before, but its cancel may be for a later one"
    )


def test_windows_of_random_files_together_give_every_row_once(table: Table) -> None:
    dice = random.Random(5)
    everything = [row(dice.randrange(100), arrival) for arrival in range(300)]
    names = [
        write_file(table.folder, f"soon-{number}.parquet", table_of(*everything[number::7])).file.path
        for number in range(7)
    ]
    edges = [-1, *sorted(dice.sample(range(99), 5)), 99]
    found = [
        arrival
        for low, high in pairwise(edges)
        for arrival in arrivals(read_window(table.folder, names, Window(low, high)))
    ]
    assert sorted(found) == list(range(300))


@pytest.mark.parametrize("limits", [(1, 1 << 30), (40, 1 << 30), (1 << 30, 4_000), (1 << 30, 1 << 30)], ids=str)
@pytest.mark.parametrize("span", [1, 10, 100])
def test_pieces_are_the_window_in_order_and_no_instant_is_cut(
    table: Table, monkeypatch: pytest.MonkeyPatch, limits: tuple[int, int], span: int
) -> None:
    """Files of several row groups each; all rows due at one instant in the extreme."""
    monkeypatch.setattr(files, "ROW_GROUP_ROWS", 5)
    dice = random.Random(span)
    everything = [row(dice.randrange(span), arrival) for arrival in range(300)]
    names = [write_file(table.folder, f"soon-{n}.parquet", table_of(*everything[n::7])).file.path for n in range(7)]
    window = Window(-1, span // 2)
    wanted = sorted((each["due"], each["arrival"]) for each in everything if each["due"] <= span // 2)
    with files.SortedRows(table.folder, names, window, piece=limits) as rows:
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
    file, _ = write_file(table.folder, "soon-1.parquet", messages(3))
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(CorruptTable, match=r"soon-2\.parquet of the table"):
        files.SortedRows(table.folder, [file.path, "soon-2.parquet"], Window(-1, NEVER))
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("spoil", [damage_cut, damage_flipped, damage_gone])
def test_a_damaged_file_is_named_and_says_what_to_do(table: Table, spoil: Callable[[Path], None]) -> None:
    rows = table_of(*(row(n, n, record=random.Random(n).randbytes(200)) for n in range(500)))
    file, _ = write_file(table.folder, "soon-1.parquet", rows)
    spoil(Path(table.folder.path(file.path)))
    with pytest.raises(CorruptTable, match=r"soon-1.parquet of the table .* cannot be read: .*sets it aside"):
        read_window(table.folder, [file.path], Window(-1, NEVER))


def test_every_sync_is_traced_where_that_is_asked_for(
    table: Table, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace = tmp_path / "trace"
    monkeypatch.setenv("POSTDATE_SYNC_TRACE", str(trace))
    file, _ = write_file(table.folder, "soon-1.parquet", messages(3))
    sync_path(str(tmp_path))
    lines = [json.loads(line) for line in trace.read_text().splitlines()]
    both = [table.folder.path(name) for name in (file.path, name_index(file.path))]
    assert [line["path"] for line in lines] == [*both, table.folder.base, str(tmp_path)]
    assert lines[0]["size"] == file.bytes
    assert {file.path, name_index(file.path)} <= set(lines[2]["names"])


def test_rows_of_the_log_that_came_too_late_for_a_window_are_left_out(table: Table) -> None:
    rows = table_of(row(10, 5), row(10, 6), row(10, OWN), row(10, 7, kind=CANCEL))
    file, _ = write_file(table.folder, "soon-1.parquet", rows)
    assert arrivals(read_window(table.folder, [file.path], Window(-1, 10, before=6))) == [5, 7, OWN]
    assert arrivals(read_window(table.folder, [file.path], Window(-1, 10))) == [5, 6, 7, OWN]


def test_a_file_of_a_job_is_found_by_any_name_that_it_may_have(table: Table) -> None:
    path = "_import-x-soon-1.parquet"
    with pytest.raises(FileNotFoundError, match=path):
        find_beside(table.folder, path, 9)
    write_file(table.folder, path, messages(1))
    for far in (9, 12):
        name = find_beside(table.folder, path, far)
        table.folder.rename(name, name_taken_in(path, 9))
    assert find_beside(table.folder, path, 9) == name_taken_in(path, 9)
    assert find_beside(table.folder, path, 12) == name_taken_in(path, 9), "an earlier try has renamed it"
