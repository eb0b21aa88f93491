"""Properties of many messages at once, as `message.decode_properties` reads those of one: a name begins where an entry
does, the last entry may lack its end, of two entries with one name the later counts, an empty name or value is none.

    UNIQ_KEY 1 7F00... 2 KEYS 1 a 2 TAGS 1 red 2 | KEYS 1 b 2 TAGS 1 blue | ...       one row behind the other

Nothing here loops over rows. Text that is not UTF-8 is null, or left out of a map.
"""

from functools import cached_property
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from postdate.bulk.texts import Bytes, as_text, gather, numbers_at
from postdate.message import decode_properties

_VALUE_BEGINS, _VALUE_ENDS = 1, 2
_WIDTHS = ((8, "<u8"), (4, "<u4"), (1, "u1"))  # letters of a name, compared as one number
_TABLE_MAX = 1 << 22  # rows times names of a batch; there are a dozen names, unless somebody means it


class _Entries(NamedTuple):
    """Names and values that are not empty: where a name begins, where its value is parted from it, where that ends. The
    entries of row n are those from offsets[n] on.
    """

    start: np.ndarray
    middle: np.ndarray
    stop: np.ndarray
    offsets: np.ndarray

    @property
    def row(self) -> np.ndarray:
        return np.repeat(np.arange(len(self.offsets) - 1), np.diff(self.offsets))


class Properties:
    """`encoded` is a column of them, as records hold them."""

    def __init__(self, encoded: pa.Array) -> None:
        self.encoded = encoded
        self._data = Bytes(np.frombuffer(encoded.buffers()[2] or b"", np.uint8))
        bounds = np.frombuffer(encoded.buffers()[1], np.int32)[encoded.offset : encoded.offset + len(encoded) + 1]
        self._bounds = bounds.astype(np.int64)

    def decoded(self) -> list[dict[str, str]]:
        """One by one; for what is rarely asked. Raises IllegalMessage."""
        return [decode_properties(each) for each in self.encoded.to_pylist()]

    def value(self, name: str) -> pa.Array:
        """The value of a name in each row, null where there is none."""
        _, middle, stop, offsets = self._entries
        which = self._named(name.encode())
        found = as_text(gather(self._data, middle[which] + 1, stop[which]))
        row_count = len(offsets) - 1
        if len(which) == row_count and ((which >= offsets[:-1]) & (which < offsets[1:])).all():
            return found  # each row has one: the usual case
        index = np.full(row_count, -1, np.int64)
        index[np.searchsorted(offsets, which, "right") - 1] = np.arange(len(which))  # the last one of a row stays
        return found.take(pa.array(index, mask=index < 0))

    def _named(self, name: bytes) -> np.ndarray:
        """Which of the entries have this name."""
        start, middle, _, _ = self._entries
        which = np.flatnonzero(middle - start == len(name))
        at = 0
        for width, kind in _WIDTHS:
            while at + width <= len(name):
                letters = numbers_at(self._data.array, kind)[start[which] + at]
                which = which[letters == int.from_bytes(name[at : at + width], "little")]
                at += width
        return which

    def maps(self) -> pa.Array:
        """All of them, by row."""
        start, middle, stop, offsets = self._entries
        names, values = (as_text(gather(self._data, *each)) for each in ((start, middle), (middle + 1, stop)))
        keep = _last_ones(self._entries.row, names, values)
        if not keep.all():
            names, values = names.filter(pa.array(keep)), values.filter(pa.array(keep))
            offsets = np.append(0, np.cumsum(keep))[offsets]
        return pa.MapArray.from_arrays(pa.array(offsets.astype(np.int32)), names, values)

    @cached_property
    def _entries(self) -> _Entries:
        start, stop = self._between()
        middle = self._middle(start, stop)
        whole = (middle > start) & (middle + 1 < stop)
        if not whole.all():
            start, middle, stop = start[whole], middle[whole], stop[whole]
        return _Entries(start, middle, stop, np.searchsorted(start, self._bounds))

    def _between(self) -> tuple[np.ndarray, np.ndarray]:
        """Where entries, whole or not, begin and end: at an end, or at that of a row which lacks it."""
        data, bounds = self._data.array, self._bounds
        stop = np.flatnonzero(data == _VALUE_ENDS)
        stop = stop[(stop >= bounds[0]) & (stop < bounds[-1])]
        row_ends = bounds[1:][bounds[1:] > bounds[:-1]]
        row_ends = row_ends[data[row_ends - 1] != _VALUE_ENDS]
        step = np.ones(len(stop), np.int64)
        if len(row_ends):
            both = np.concatenate([row_ends, stop])
            order = np.argsort(both, kind="stable")
            stop, step = both[order], (order >= len(row_ends)).astype(np.int64)
        return np.append(bounds[0], (stop + step)[:-1])[: len(stop)], stop

    def _middle(self, start: np.ndarray, stop: np.ndarray) -> np.ndarray:
        """Where values begin: behind the first of these in each entry; behind its stop where it has none."""
        begins = np.flatnonzero(self._data.array == _VALUE_BEGINS)
        if len(begins) == len(start) and ((begins >= start) & (begins < stop)).all():
            return begins  # one in each: the usual case
        return np.append(begins, len(self._data))[np.searchsorted(begins, start)]


def _last_ones(row: np.ndarray, names: pa.Array, values: pa.Array) -> np.ndarray:
    """Which of these entries count: the last one of its row and name, if both are text."""
    encoded = names.dictionary_encode()
    count = len(encoded.dictionary) + 1
    pair = row * count + encoded.indices.fill_null(count - 1).to_numpy()
    number = np.arange(len(pair))
    if len(pair) and (int(row[-1]) + 1) * count > _TABLE_MAX:
        pair = np.unique(pair, return_inverse=True)[1]
    last = np.empty(int(pair.max()) + 1 if len(pair) else 0, np.int64)
    last[pair] = number  # of several the last one stays
    keep: np.ndarray = last[pair] == number
    if names.null_count or values.null_count:
        keep &= names.is_valid().to_numpy(False) & values.is_valid().to_numpy(False)
    return keep
