"""The index of keys beside each file: what stands where, that it is written, renamed and removed with its file."""

import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.fs as pafs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from postdate.keys import key_hash
from postdate.table import keys
from postdate.table.delta import Table
from postdate.table.files import (
    TableFolder,
    describe_file,
    remove_file,
    remove_idle_indexes,
    rename_file,
    write_file,
)
from postdate.table.format import CANCEL, DROP, MESSAGE, MOVE, SCHEMA
from postdate.table.keys import HEAD, encode_index, further, mix, name_file, name_index, open_index, upper
from tests.support.table_rows import Row, keyed_row, messages, row, table_of

HASHES = some.sampled_from([0, 5, -6, (1 << 63) - 1, -(1 << 63), 5 << 32, -(7 << 33)])
ROWS = some.fixed_dictionaries(
    {
        "kind": some.sampled_from([MESSAGE] * 3 + [CANCEL, DROP, MOVE]), "arrival": some.integers(1, 1 << 62),
        "unique_hash": HASHES, "key_hash": HASHES,
        "key": some.sampled_from([None, "a", "a b", " a b  c b ", "\u00e4 \u00f6", ""]),
    }
).map(lambda each: row(1, **each))  # type: ignore[arg-type]  # fmt: skip


def places_of(each: Row) -> set[int]:
    """Where a row stands, by the table of the module."""
    unique, first = each["unique_hash"], each["key_hash"]
    if each["kind"] == MESSAGE:
        further_keys = [key for key in (each["key"] or "").split(" ") if key][1:]
        return {upper(hashed) for hashed in (unique, first) if hashed} | {further(key) for key in further_keys}
    values = {CANCEL: [unique, first], MOVE: [unique], DROP: [each["arrival"]]}[each["kind"]]
    return {mix(value) for value in values if value}


def written(rows: pa.Table, folder: Path) -> keys.KeyIndex:
    path = folder / "index"
    path.write_bytes(encode_index(rows))
    found = open_index(pafs.LocalFileSystem(), str(path))
    assert found is not None
    return found


@settings(max_examples=60, deadline=None)
@given(rows=some.lists(ROWS, max_size=12))
def test_every_row_stands_where_it_should_and_nowhere_else(
    rows: list[Row], tmp_path_factory: pytest.TempPathFactory
) -> None:
    index = written(pa.Table.from_pylist(rows, SCHEMA), tmp_path_factory.mktemp("keys"))
    for place in {place for each in rows for place in places_of(each)} | {0, 1 << 31}:
        assert index.find([place]) == [number for number, each in enumerate(rows) if place in places_of(each)]


def many(count: int) -> pa.Table:
    dice = random.Random(3)
    rows = pa.concat_tables([messages(1)] * count)
    for name in ("unique_hash", "key_hash"):
        values = pa.array([dice.getrandbits(64) - (1 << 63) for _ in range(count)], pa.int64())
        rows = rows.set_column(rows.column_names.index(name), SCHEMA.field(name), values)
    return rows


def test_an_index_that_is_read_block_by_block_says_the_same(tmp_path: Path) -> None:
    rows = many(30_000)
    near = written(rows, tmp_path)
    away = open_index(pafs.SubTreeFileSystem(str(tmp_path), pafs.LocalFileSystem()), "index")
    assert away is not None
    for number in (0, 1, 17, 12_345, 29_999):
        place = upper(rows["key_hash"][number].as_py())
        assert number in near.find([place])
        assert near.find([place]) == away.find([place])
    assert near.find([]) == away.find([]) == []


def test_an_index_takes_16_bytes_for_a_message_with_two_keys() -> None:
    assert len(encode_index(many(100))) == HEAD.size + 16 * 100


@pytest.mark.parametrize("data", [b"", b"PD", b"\0" * 16, encode_index(many(2))[:-1], encode_index(many(2)) + b"\0"])
def test_what_is_no_index_is_none(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "index").write_bytes(data)
    assert open_index(pafs.LocalFileSystem(), str(tmp_path / "index")) is None
    assert open_index(pafs.LocalFileSystem(), str(tmp_path / "none")) is None


def test_an_index_is_the_same_without_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on an executor that does not have it."""
    rows = pa.concat_tables([many(500), table_of(*(keyed_row(1, n, unique="U", keys="K L M L") for n in range(20)))])
    usual = encode_index(rows)
    monkeypatch.setattr(keys, "HAS_NUMPY", False)
    assert encode_index(rows) == usual


def test_numbers_that_are_not_spread_evenly_are_found(tmp_path: Path) -> None:
    """As where many messages share a key."""
    alike = pa.concat_tables([table_of(keyed_row(1, 1, keys="shared"))] * 9_000)
    index = written(pa.concat_tables([alike, many(3)]), tmp_path)
    assert index.find([upper(key_hash("shared"))]) == list(range(9_000))
    assert index.find([0, 0xFFFFFFFF]) == []


# -- beside the files -------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> TableFolder:
    return Table(str(tmp_path / "messages")).folder


def test_a_file_has_its_index_beside_it(folder: TableFolder) -> None:
    rows = table_of(*(keyed_row(n, n, unique=f"U{n}") for n in range(9)))
    write_file(folder, "soon-1.parquet", rows)
    assert name_index("soon-1.parquet") == "_keys-soon-1"
    assert name_file("_keys-soon-1") == "soon-1.parquet"
    index = open_index(folder.files, folder.path("_keys-soon-1"))
    assert index is not None
    assert index.find([upper(key_hash("U7"))]) == [7]


def test_an_index_is_renamed_with_its_file_whatever_an_earlier_try_has_done(folder: TableFolder) -> None:
    source, target = "_job-00000001-soon-a.parquet", "soon-00000000000000000001-a.parquet"
    write_file(folder, source, messages(3))
    folder.rename(name_index(source), name_index(target))  # and then it was killed
    for _ in range(2):
        rename_file(folder, source, target)
        assert {name for name in folder.sizes() if "soon" in name} == {target, name_index(target)}
    rename_file(folder, target, source)
    assert {name for name in folder.sizes() if "soon" in name} == {source, name_index(source)}
    folder.remove(name_index(source))  # as an earlier version has written it
    rename_file(folder, source, target)
    assert describe_file(folder, target).file.rows == 3
    with pytest.raises(FileNotFoundError):
        rename_file(folder, "soon-2.parquet", "soon-3.parquet")


def test_indexes_go_when_their_files_have_gone(tmp_path: Path) -> None:
    table = Table(str(tmp_path / "messages"))
    stays, leaves = (write_file(table.folder, f"soon-{n}.parquet", messages(3)) for n in range(2))
    beside = write_file(table.folder, "_job-00000001-soon-a.parquet", messages(3))
    table.commit([stays, leaves])
    table.commit(removed=[leaves.file])
    table.remove_old_files(retention_hours=0)
    expected = {each for file, _ in (stays, beside) for each in (file.path, name_index(file.path))}
    assert {name for name in table.folder.sizes() if not name.startswith(".")} == expected
    remove_file(table.folder, beside.file.path)
    remove_file(table.folder, beside.file.path)
    remove_idle_indexes(table.folder)
    assert set(table.folder.sizes()) == {stays.file.path, name_index(stays.file.path)}


def test_the_name_of_the_format_is_in_its_first_bytes() -> None:
    data: Any = encode_index(many(1))
    assert data[:4] == b"PDK1"
