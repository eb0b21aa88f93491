"""The table on disk: which files and which entries of the Delta log count."""

import json

import pytest

from postdate.table.format import (
    ACTIONS,
    File,
    batch_file_name,
    count_sound,
    entry_path,
    is_untaken,
    parse_versions,
    writer_options,
)


@pytest.mark.parametrize(
    ("path", "wanted"),
    [
        (batch_file_name("soon", 10, "a"), True), (batch_file_name("later", 11, "a"), True),
        (batch_file_name("soon", 9, "a"), False),
        ("hour-00000000000000000010-a.parquet", False), ("soon-by-hand.parquet", False), ("soon", False),
    ],
)  # fmt: skip
def test_files_of_a_batch_are_untaken_until_spark_acknowledges_it(path: str, wanted: bool) -> None:
    assert is_untaken(path, 10) is wanted
    assert File(path, 1, 1, 0, 0, 0, 0).is_untaken(10) is wanted


def test_files_that_stay_are_written_smaller() -> None:
    assert writer_options("hour-1.parquet")["compression"] == "zstd"
    assert writer_options("soon-1.parquet")["compression"] == "lz4"


def test_versions_are_those_of_whole_names() -> None:
    names = [entry_path(version).rpartition("/")[2] for version in (2, 0)]
    assert parse_versions([*names, "_last_checkpoint", f"{names[0]}.torn", "0.json"]) == [0, 2]


def commit(actions: int, wanted: int) -> bytes:
    info = {"commitInfo": {ACTIONS: str(wanted)}}
    return "\n".join(json.dumps(each) for each in [info, *[{"add": {}}] * actions]).encode()


NOTE = json.dumps({"commitInfo": {"operation": "VACUUM END"}}).encode()


@pytest.mark.parametrize(
    ("entries", "wanted"),
    [
        ([], 0),
        ([commit(2, 2)], 1),
        ([commit(2, 2), commit(1, 2)], 1),
        ([commit(2, 2), b""], 1),
        ([commit(2, 2), NOTE, NOTE], 3),
        ([commit(2, 2), NOTE, b'{"comm'], 2),
        ([commit(2, 2), b'{"comm', NOTE], 1),
        ([commit(1, 2), commit(2, 2)], 2),  # an error that is not the crash's: opening names it
    ],
    ids=str,
)
def test_a_log_counts_up_to_its_first_torn_entry_after_the_last_commit(entries: list[bytes], wanted: int) -> None:
    assert count_sound(range(len(entries)), entries.__getitem__) == wanted


def test_an_entry_after_a_gap_does_not_count() -> None:
    assert count_sound([3, 5], {3: commit(1, 1), 5: NOTE}.__getitem__) == 1
