"""A struct and the dtype beside it are one layout."""

from struct import Struct

import numpy as np
import pytest

from postdate.storage import layout

PAIRS = {
    "ROW": layout.ROW_STRUCT,
    "ENTRY": layout.ENTRY_STRUCT,
    "TIME": layout.TIME_STRUCT,
    "FAR": layout.FAR_STRUCT,
    "INDEX": layout.INDEX_STRUCT,
    "ONCE_ROW": layout.ONCE_ROW_STRUCT,
    "SINGLE": layout.SINGLE_STRUCT,
}


@pytest.mark.parametrize("name", PAIRS)
def test_what_a_struct_packs_a_dtype_reads(name: str) -> None:
    packer: Struct = PAIRS[name]
    dtype: np.dtype = getattr(layout, name)
    assert dtype.names is not None
    values = tuple(range(1, len(dtype.names) + 1))
    assert np.frombuffer(packer.pack(*values), dtype).tolist() == [values]


def test_every_pair_is_tried() -> None:
    paired = {name.removesuffix("_STRUCT") for name in vars(layout) if name.endswith("_STRUCT")}
    assert paired - {"INDEX_TWO"} == PAIRS.keys(), "INDEX_TWO packs two rows of INDEX"


def test_two_rows_of_the_index_are_packed_at_once() -> None:
    rows = np.frombuffer(layout.INDEX_TWO_STRUCT.pack(1, 2, 3, 4), layout.INDEX)
    assert rows.tolist() == [(1, 2), (3, 4)]
