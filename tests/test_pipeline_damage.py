"""A table that is damaged while Spark works on it: what is said, and what the broker does meanwhile."""

from pathlib import Path
from typing import Any

import pytest
from piping import MINUTE_MS, NOW, piping

from postdate.errors import PipelineFailed


def test_a_file_that_cannot_be_read_ends_the_pipeline_and_is_named(tmp_path: Path, spark: Any) -> None:
    with piping(tmp_path, spark) as piped:
        piped.send(*[NOW + 4 * MINUTE_MS + n for n in range(200)])
        piped.start_driver()
        piped.follow()
        (damaged,) = (piped.table / "messages").glob("*.parquet")
        whole = damaged.read_bytes()
        damaged.write_bytes(whole[:300] + bytes([whole[300] ^ 1]) + whole[301:])
        with pytest.raises(PipelineFailed, match=damaged.name):
            piped.travel(NOW + 5 * MINUTE_MS)
        damaged.unlink()
        piped.start_driver()
        piped.travel(NOW + 5 * MINUTE_MS)
