"""Properties of many messages at once, as `message.decode_properties` reads those of one: a name begins where an entry
does, the last entry may lack its end, of two entries with one name the later counts, an empty name or value is none.

    UNIQ_KEY 1 7F00... 2 KEYS 1 a 2 TAGS 1 red 2 | KEYS 1 b 2 TAGS 1 blue | ...       one row behind the other

Nothing here loops over rows. Text that is not UTF-8 is null, or left out of a map.
"""

from functools import cached_property

import numpy as np
import pyarrow as pa

from postdate.bulk.texts import Bytes, as_text, gather, numbers_at
from postdate.message import decode_properties

MAP = pa.map_(pa.string(), pa.string())
_VALUE_BEGINS, _VALUE_ENDS = 1, 2
_LETTERS = 4  # the last ones of a name, compared first, as one number; no name that is asked for is shorter
_TABLE_MAX = 1 << 22  # rows times names of a batch; there are a dozen names, unless somebody means it


class Properties:
    """`encoded` is a column of them, as records hold them."""

    def __init__(self, encoded: pa.Array) -> None:
        self.encoded = encoded
        self._data = Bytes(np.frombuffer(encoded.buffers()[2] or b"", np.uint8))
        self._bounds = np.frombuffer(encoded.buffers()[1], np.int32)[: len(encoded) + 1].astype(np.int64)

    @cached_property
    def _begins(self) -> np.ndarray:
        """Where values may begin: behind these."""
        return np.flatnonzero(self._data.array == _VALUE_BEGINS)

    @cached_property
    def _ends(self) -> np.ndarray:
        """Where entries end, but for the last one of a row that lacks its end."""
        return np.flatnonzero(self._data.array == _VALUE_ENDS)

    def decoded(self) -> list[dict[str, str]]:
        """One by one; for what is rarely asked. Raises IllegalMessage."""
        return [decode_properties(each) for each in self.encoded.to_pylist()]

    # -- one name -----------------------------------------------------------------------------------------------

    def value(self, name: str) -> pa.Array:
        """The value of a name in each row, null where there is none."""
        return self._behind(self._named(name.encode()), len(name))

    @cached_property
    def _letters(self) -> tuple[np.ndarray, np.ndarray]:
        """Where values may begin, and the letters before."""
        begins = self._begins[self._begins >= _LETTERS]
        return begins, numbers_at(self._data.array, "<u4")[begins - _LETTERS]

    def _named(self, name: bytes) -> np.ndarray:
        """Where a value begins with this name before it, or with one that ends so."""
        begins, letters = self._letters
        found = begins[letters == int.from_bytes(name[-_LETTERS:], "little")]
        found = found[found >= len(name)]
        for index, letter in enumerate(name[:-_LETTERS]):
            found = found[self._data.array[found - len(name) + index] == letter]
        return found

    def _behind(self, begins: np.ndarray, name_bytes: int) -> pa.Array:
        data, bounds = self._data, self._bounds
        row, name = self._row_of(begins), begins - name_bytes
        is_name = (name == bounds[row]) | ((name > bounds[row]) & (data.array[name - 1] == _VALUE_ENDS))
        start = begins + 1
        stop = np.minimum(np.append(self._ends, len(data))[np.searchsorted(self._ends, start)], bounds[row + 1])
        is_value = is_name & (stop > start)
        if is_value.all() and len(row) == len(bounds) - 1 and (np.diff(row) == 1).all():
            return as_text(gather(data, start, stop))  # each row has one: the usual case
        row, start, stop = row[is_value], start[is_value], stop[is_value]
        index = np.full(len(bounds) - 1, -1, np.int64)
        index[row] = np.arange(len(row))  # the last one of a row stays
        return as_text(gather(data, start, stop)).take(pa.array(index, mask=index < 0))

    def _row_of(self, places: np.ndarray) -> np.ndarray:
        """In which row each place lies."""
        bounds = self._bounds
        if len(places) == len(bounds) - 1 and ((places >= bounds[:-1]) & (places < bounds[1:])).all():
            return np.arange(len(places))  # one in each: the usual case, at a tenth of the price
        return np.searchsorted(bounds, places, "right") - 1

    # -- all names ----------------------------------------------------------------------------------------------

    def maps(self) -> pa.Array:
        """All of them, by row."""
        start, middle, stop = self._entries()
        names, values = (as_text(gather(self._data, *each)) for each in ((start, middle), (middle + 1, stop)))
        offsets = np.append(np.searchsorted(start, self._bounds[:-1]), len(start))
        keep = _last_ones(np.repeat(np.arange(len(self.encoded)), np.diff(offsets)), names, values)
        if not keep.all():
            names, values = names.filter(pa.array(keep)), values.filter(pa.array(keep))
            offsets = np.append(0, np.cumsum(keep))[offsets]
        return pa.MapArray.from_arrays(pa.array(offsets.astype(np.int32)), names, values)

    def _entries(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Where each name begins, ends, and its value ends. An entry lies between two ends, or the bounds of a row."""
        ends, bounds = self._ends, self._bounds
        start = np.sort(np.concatenate([bounds[:-1], ends + 1]), kind="stable")
        stop = np.sort(np.concatenate([ends, bounds[1:]]), kind="stable")
        some = stop > start
        start, stop = start[some], stop[some]
        middle = self._first_begins(start, stop)
        whole = (middle > start) & (middle + 1 < stop)
        return (start, middle, stop) if whole.all() else (start[whole], middle[whole], stop[whole])

    def _first_begins(self, start: np.ndarray, stop: np.ndarray) -> np.ndarray:
        """The first place behind each start where a value begins; as it comes, where there is none before the stop."""
        begins = self._begins
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
