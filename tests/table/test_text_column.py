"""One column of a Parquet file, as texts."""

from operator import itemgetter
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from postdate.errors import UsageError
from postdate.table import text_column


def test_texts_and_whole_numbers_are_read_without_nulls(tmp_path: Path) -> None:
    path = str(tmp_path / "a.parquet")
    columns = {"a": ["x", None, "y"], "n": [1, None, -3], "l": pa.array(["x", "y", "z"], pa.large_string())}
    pq.write_table(pa.table(columns), path, row_group_size=2)
    for name, texts in {"a": ["x", "y"], "n": ["1", "-3"], "l": ["x", "y", "z"]}.items():
        place = list(columns).index(name)
        assert list(text_column.read(path, itemgetter(place))) == texts


def test_what_holds_no_texts_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"a": [1.5]}), path)
    with pytest.raises(UsageError, match="column a is double, expected text or whole numbers"):
        text_column.read(str(path), lambda names: names[0])
    path.write_bytes(b"PAR1 and nothing else")
    with pytest.raises(UsageError, match="is not a Parquet file"):
        text_column.read(str(path), lambda names: names[0])
