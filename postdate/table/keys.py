"""The index of keys beside each file of the table: which of its rows have a key, and which take a message away.

    soon-00000000000000000000-0123456789ab.parquet     a file of the table
    _keys-soon-00000000000000000000-0123456789ab       its index; Delta passes over names with an underscore

    0       4         8       12         16                   16 + 4 count         16 + 8 count
    +-------+---------+-------+----------+--------------------+--------------------+
    | magic | version | count | checksum | count hashes (u32) | count rows (u32)   |
    +-------+---------+-------+----------+--------------------+--------------------+

All little-endian. Hashes ascend; the row with the same place is the number of a row of the file, from 0, and ascends
where hashes are equal. The checksum (zlib's crc32) covers hashes and rows.

    row         stands under
    message     the upper half of `unique_hash` and of `key_hash`, where they are not 0; crc32 of each key of KEYS but
                the first
    cancel      `mix` of its hash
    drop        `mix` of its arrival, which is that of the message
    move        `mix` of its `unique_hash`, which is the arrival of the message

So a question reads the messages of a key, then what takes those away, and nothing else. A hash of 32 bits is a hint:
the row decides. A file without an index, as earlier versions wrote it, is read instead. Executors import this module:
it needs the standard library and pyarrow.
"""

import mmap
from bisect import bisect_left
from collections.abc import Callable, Collection, Sequence
from struct import Struct
from zlib import crc32

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.fs as pafs

from postdate.table.format import CANCEL, DROP, MESSAGE, MOVE

try:
    import numpy as np

    HAS_NUMPY = True
except ImportError:  # an executor need not have it
    HAS_NUMPY = False

HEAD = Struct("<IIII")
MAGIC = 0x314B4450  # "PDK1"
VERSION = 1
PREFIX = "_keys-"
COLUMNS = ("kind", "arrival", "unique_hash", "key_hash", "key")  # of a row, that its entries are made from

_ENTRY_BYTES = 8
_SUFFIX = ".parquet"
_MULTIPLIER = 0x9E3779B97F4A7C15  # odd; 2^64 divided by the golden ratio
_UINT64_MASK = (1 << 64) - 1
_HALF, _LOWER = pa.scalar(32, pa.uint64()), pa.scalar((1 << 32) - 1, pa.uint64())
_BLOCK_BYTES = 16_384  # of a remote index, read at once


def name_index(path: str) -> str:
    """Returns the name of the index of a file."""
    return f"{PREFIX}{path.removesuffix(_SUFFIX)}"


def name_file(index: str) -> str:
    """Returns the name of the file that an index is for."""
    return f"{index.removeprefix(PREFIX)}{_SUFFIX}"


# -- hashes -----------------------------------------------------------------------------------------------------


def upper(hashed: int) -> int:
    """Returns where a message with this hash of 64 bits stands; the sign does not matter."""
    return hashed >> 32 & 0xFFFFFFFF


def mix(value: int) -> int:
    """Returns where a row stands that takes the message of this hash, or of this arrival, away."""
    return (value * _MULTIPLIER & _UINT64_MASK) >> 32


def further(key: str) -> int:
    """Returns where a message stands that has this key among its KEYS, but not as the first one."""
    return crc32(key.encode("utf-8", "surrogatepass"))


def _upper_of(values: pa.Array) -> pa.Array:
    return pc.shift_right(values.view(pa.uint64()), _HALF).cast(pa.uint32())


def _mix_of(values: pa.Array) -> pa.Array:
    return _upper_of(pc.multiply(values.view(pa.uint64()), pa.scalar(_MULTIPLIER, pa.uint64())))


# Kinds of rows, the column under whose values they stand, and how.
_STANDS_UNDER: tuple[tuple[tuple[int, ...], str, Callable[[pa.Array], pa.Array]], ...] = (
    ((MESSAGE,), "unique_hash", _upper_of),
    ((MESSAGE,), "key_hash", _upper_of),
    ((CANCEL, MOVE), "unique_hash", _mix_of),
    ((CANCEL,), "key_hash", _mix_of),
    ((DROP,), "arrival", _mix_of),
)

# -- making -----------------------------------------------------------------------------------------------------


def entries_of(rows: pa.Table) -> tuple[pa.Array, pa.Array]:
    """Returns the hashes and row numbers of the entries for rows, in no order."""
    column = {name: rows[name].combine_chunks() for name in COLUMNS}
    number = pa.arange(0, rows.num_rows, 1).cast(pa.uint32())
    hashes, numbers = [pa.array([], pa.uint32())], [pa.array([], pa.uint32())]
    present = set(pc.unique(column["kind"]).to_pylist())
    for kinds, name, place_of in _STANDS_UNDER:
        if present.isdisjoint(kinds):
            continue
        stands = pc.not_equal(column[name], 0)
        if not present.issubset(kinds):
            stands = pc.and_(stands, pc.is_in(column["kind"], pa.array(kinds, pa.int8())))
        is_all = pc.all(stands).as_py()
        hashes.append(place_of(column[name] if is_all else column[name].filter(stands)))
        numbers.append(number if is_all else number.filter(stands))
    further_hashes, of_messages = _further_of(column["kind"], column["key"])
    return pa.concat_arrays([*hashes, further_hashes]), pa.concat_arrays([*numbers, of_messages])


def _further_of(kind: pa.Array, key: pa.Array) -> tuple[pa.Array, pa.Array]:
    """Returns the entries of the keys after the first one; most messages have none."""
    text = key.buffers()[2]
    if text is None or text.to_pybytes().find(b" ") < 0:
        return pa.array([], pa.uint32()), pa.array([], pa.uint32())
    has_more = pc.and_(pc.equal(kind, MESSAGE), pc.match_substring(key, " ").fill_null(False))
    messages = pc.indices_nonzero(has_more).cast(pa.uint32())
    split = pc.split_pattern(key.take(messages), " ")
    keys, of_message = pc.list_flatten(split), pc.list_parent_indices(split)
    is_key = pc.not_equal(pc.binary_length(keys), 0)
    keys, of_message = keys.filter(is_key), of_message.filter(is_key)
    if not len(keys):
        return pa.array([], pa.uint32()), pa.array([], pa.uint32())
    is_further = pa.concat_arrays([pa.array([False]), pc.equal(of_message[1:], of_message[:-1])])
    found = map(crc32, keys.filter(is_further).cast(pa.binary()).to_pylist())
    return pa.array(found, pa.uint32()), messages.take(of_message.filter(is_further))


def encode_index(rows: pa.Table) -> bytes:
    """Returns the index of the rows of a file."""
    hashes, numbers = (part.cast(pa.uint64()) for part in entries_of(rows))
    count = len(hashes)
    entries = _sort(pc.bit_wise_or(pc.shift_left(hashes, _HALF), numbers))
    parts = (pc.shift_right(entries, _HALF), pc.bit_wise_and(entries, _LOWER)) if count else ()
    data = b"".join(memoryview(part.cast(pa.uint32()).buffers()[1])[: 4 * count] for part in parts)
    return HEAD.pack(MAGIC, VERSION, count, crc32(data)) + data


def _sort(numbers: pa.Array) -> pa.Array:
    """Sorts numbers of 64 bits; numpy does it in a tenth of the time."""
    if HAS_NUMPY:
        return pa.array(np.sort(numbers.to_numpy()))
    return numbers.take(pc.array_sort_indices(numbers))


# -- reading ----------------------------------------------------------------------------------------------------


class KeyIndex:
    """An open index."""

    def __init__(self, hashes: Sequence[int], rows: Sequence[int]) -> None:
        self._hashes, self._rows = hashes, rows

    def find(self, places: Collection[int]) -> list[int]:
        """Returns the numbers of the rows that stand under one of these, ascending."""
        found: set[int] = set()
        for place in places:
            at = _search(self._hashes, place)
            while at < len(self._hashes) and self._hashes[at] == place:
                found.add(self._rows[at])
                at += 1
        return sorted(found)


def _search(hashes: Sequence[int], place: int) -> int:
    """Returns where the first hash at or after this one stands. Hashes are spread evenly, so that it is near the place
    where an even spread has it.
    """
    guess, reach = place * len(hashes) >> 32, _BLOCK_BYTES // 8
    low, high = max(guess - reach, 0), min(guess + reach, len(hashes))
    if (low and hashes[low] >= place) or (high < len(hashes) and hashes[high] < place):
        low, high = 0, len(hashes)
    return bisect_left(hashes, place, low, high)


def open_index(files: pafs.FileSystem, path: str) -> KeyIndex | None:
    """Opens the index at a path: maps a local one, reads of another what a question needs. Returns None where there is
    none, or what is there is no index of this version.
    """
    try:
        if isinstance(files, pafs.LocalFileSystem):
            with open(path, "rb") as file:
                data = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
            count = _count(bytes(data[: HEAD.size]), len(data))
            places = data[HEAD.size :].cast("I")
            return KeyIndex(places[:count], places[count:])
        remote = files.open_input_file(path)
        count = _count(remote.read_at(HEAD.size, 0), remote.size())
        return KeyIndex(_RemoteNumbers(remote, HEAD.size, count), _RemoteNumbers(remote, HEAD.size + 4 * count, count))
    except (FileNotFoundError, ValueError):
        return None


def _count(head: bytes, size: int) -> int:
    """Returns the count of entries. Raises ValueError where this is no index."""
    magic, version, count, _ = HEAD.unpack(head.ljust(HEAD.size, b"\0"))
    if (magic, version) != (MAGIC, VERSION) or size != HEAD.size + _ENTRY_BYTES * count:
        raise ValueError
    return int(count)


class _RemoteNumbers(Sequence[int]):
    """Numbers of 32 bits in a remote file, read block by block. Remembers the block that it has read last."""

    def __init__(self, file: pa.NativeFile, start: int, count: int) -> None:
        self._file, self._start, self._count = file, start, count
        self._block: tuple[int, memoryview] | None = None

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> int:  # type: ignore[override]  # nobody takes a slice
        number, place = divmod(index, _BLOCK_BYTES // 4)
        block = self._block
        if block is None or block[0] != number:
            size = min(_BLOCK_BYTES, 4 * self._count - number * _BLOCK_BYTES)
            data = self._file.read_at(size, self._start + number * _BLOCK_BYTES)
            self._block = block = (number, memoryview(data).cast("I"))
        return int(block[1][place])
