"""Chunks: their bytes, what opening and verifying notice, how offsets resolve."""

import struct
from pathlib import Path

import numpy as np
import pytest
from xxhash import xxh3_64_intdigest

from postdate.errors import CorruptChunk
from postdate.storage import chunk as chunks
from postdate.storage.chunk import CHUNK_BIT, Chunk, Chunks
from postdate.storage.disk import RealDisk
from postdate.storage.layout import CHUNK_HEADER_BYTES as HEADER_BYTES
from postdate.storage.layout import CHUNK_ROW

RECORDS = b"first-second-third"


@pytest.fixture
def disk(tmp_path: Path) -> RealDisk:
    return RealDisk(tmp_path)


def index(*rows: tuple[int, int, int, int]) -> np.ndarray:
    """Rows of (due, arrival, position, size)."""
    array = np.zeros(len(rows), CHUNK_ROW)
    for name, column in zip(("due", "arrival", "position", "size"), zip(*rows, strict=True), strict=False):
        array[name] = column
    return array


GOOD = index((5, 10, 0, 6), (5, 20, 6, 7), (9, 15, 13, 5))


def test_a_chunk_is_spelled_byte_by_byte(disk: RealDisk) -> None:
    chunks.write(disk, "c", GOOD, RECORDS)
    data = (disk.root / "chunks" / "c").read_bytes()
    rows = data[64 : 64 + 3 * 56]
    assert data[:4] == b"PDC1"
    assert struct.unpack_from("<IqQQqqq", data, 4) == (
        1, 3, xxh3_64_intdigest(rows), xxh3_64_intdigest(RECORDS), len(data), 5, 9,
    )  # fmt: skip
    assert struct.unpack_from("<Q", data, 56) == (xxh3_64_intdigest(data[:56]),)
    assert struct.unpack_from("<qqqI", rows, 56) == (5, 20, 64 + 3 * 56 + 6, 7)
    assert data[64 + 3 * 56 :] == RECORDS
    assert HEADER_BYTES == 64


def test_a_chunk_is_read_in_place(disk: RealDisk) -> None:
    chunks.write(disk, "c", GOOD, RECORDS)
    chunk = Chunk(disk, "c")
    chunk.verify()
    assert (chunk.head.row_count, chunk.head.due_low_ms, chunk.head.due_high_ms) == (3, 5, 9)
    assert chunk.index["due"].tolist() == [5, 5, 9]
    assert [chunk.read(int(row["position"]), int(row["size"])) for row in chunk.index] == [
        b"first-", b"second-", b"third",
    ]  # fmt: skip


def test_an_empty_chunk_is_whole(disk: RealDisk) -> None:
    chunks.write(disk, "c", index(), b"")
    chunk = Chunk(disk, "c")
    chunk.verify()
    assert len(chunk.index) == 0


def test_every_change_of_a_byte_and_every_cut_is_noticed(disk: RealDisk) -> None:
    chunks.write(disk, "c", GOOD, RECORDS)
    path = disk.root / "chunks" / "c"
    data = path.read_bytes()
    for position in range(len(data)):
        hurt = bytearray(data)
        hurt[position] ^= 0x40
        path.write_bytes(hurt)
        with pytest.raises(CorruptChunk, match="chunks/c"):
            Chunk(disk, "c").verify()
    for size in range(len(data)):
        path.write_bytes(data[:size])
        with pytest.raises(CorruptChunk, match="chunks/c"):
            Chunk(disk, "c").verify()
    path.write_bytes(data + b"\x00")
    with pytest.raises(CorruptChunk, match=f"{len(data) + 1} bytes, its header says {len(data)}"):
        Chunk(disk, "c")
    path.unlink()
    with pytest.raises(CorruptChunk, match="is missing or cut short"):
        Chunk(disk, "c")


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        (index((5, 20, 0, 6), (5, 10, 6, 7)), "row 1 is not in \\(due, arrival\\) order"),
        (index((5, 10, 0, 6), (6, 10, 0, 6), (5, 30, 6, 7)), "row 2 is not in"),
        (index((5, 10, 0, len(RECORDS) + 1)), "points outside the records"),
        (index((5, 10, -1, 3)), "points outside the records"),
    ],
)
def test_an_uploader_that_errs_is_found_out(disk: RealDisk, rows: np.ndarray, said: str) -> None:
    chunks.write(disk, "c", rows, RECORDS)
    with pytest.raises(CorruptChunk, match=said):
        Chunk(disk, "c").verify()


def head_with(data: bytes, **changes: int) -> bytes:
    """The file with changed header fields and a header sum that fits them."""
    names = ("magic", "version", "count", "index_sum", "records_sum", "bytes", "low", "high")
    fields = dict(zip(names, struct.unpack_from("<IIqQQqqq", data), strict=True)) | changes
    head = struct.pack("<IIqQQqqq", *fields.values())
    return head + struct.pack("<Q", xxh3_64_intdigest(head)) + data[64:]


@pytest.mark.parametrize("changes", [{"count": 4}, {"count": -1}, {"count": 1 << 40}, {"version": 2}, {"count": 2}])
def test_a_header_that_does_not_fit_its_file_is_corrupt(disk: RealDisk, changes: dict[str, int]) -> None:
    chunks.write(disk, "c", GOOD, RECORDS)
    path = disk.root / "chunks" / "c"
    path.write_bytes(head_with(path.read_bytes(), **changes))
    with pytest.raises(CorruptChunk, match="chunks/c"):
        Chunk(disk, "c").verify()


@pytest.mark.parametrize("changes", [{"low": 6}, {"high": 8}, {"high": 1 << 50}])
def test_a_header_that_lies_about_its_dues_is_corrupt(disk: RealDisk, changes: dict[str, int]) -> None:
    """A broker believes `due high` when it compares a chunk with the horizon."""
    chunks.write(disk, "c", GOOD, RECORDS)
    path = disk.root / "chunks" / "c"
    path.write_bytes(head_with(path.read_bytes(), **changes))
    with pytest.raises(CorruptChunk, match="chunks/c"):
        Chunk(disk, "c").verify()


def test_offsets_of_staged_chunks_resolve_to_their_records(disk: RealDisk) -> None:
    held = Chunks(disk)
    bases = [CHUNK_BIT, CHUNK_BIT + 4_096, CHUNK_BIT + 8_192]
    for number, base in enumerate(bases):
        chunks.write(disk, f"c{number}", index((5, 10, 0, 4)), f"rec{number}".encode())
        held.add(base, held.open(f"c{number}"))
    position = HEADER_BYTES + CHUNK_ROW.itemsize
    assert [held.read(base + position, 4) for base in bases] == [b"rec0", b"rec1", b"rec2"]
    assert [held.name_of(base) for base in held.bases()] == ["c0", "c1", "c2"]
    assert held.holds(bases[1] + position)
    assert not held.holds(bases[1] + 4_000)
    assert not held.holds(CHUNK_BIT - 1)
    assert held.read(CHUNK_BIT - 1, 4) == b""

    held.remove(bases[1])
    assert held.bases() == [bases[0], bases[2]]
    assert held.read(bases[1] + position, 4) == b"", "it is gone, and its neighbour does not answer for it"
    assert not held.holds(bases[1] + position)
    assert disk.list("chunks") == ["c0", "c2"]
