"""The benchmark of lookups: a small run of it."""

import pytest

from benchmarks import keys


def test_a_small_run_prints_its_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert keys.main(["--quick"]) == 0
    heads, row = capsys.readouterr().out.strip().splitlines()
    assert heads.startswith("rows ")
    assert row.startswith("2,000 ")
    assert " 16 bytes " in row, "two entries of 8 bytes for two keys; the head of 16 bytes is one for 500 messages"
