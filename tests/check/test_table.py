"""The check of the table: what a pipeline leaves is ok, whatever it was in the middle of; each damage is found."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable

from postdate.check import Report, check_folder
from postdate.contract import State
from postdate.errors import Refused
from postdate.storage.disk import RealDisk
from postdate.table import merging
from postdate.table.delta import Table
from postdate.table.files import RowGroup, TableFolder, WrittenFile
from postdate.table.format import CANCEL, SCHEMA, File, entry_path, parse_versions, writer_options
from tests.support.core import DAY_MS, HOUR_MS, MINUTE_MS, snapshot
from tests.support.pipeline import BEGIN, World

STATE = State(
    now_ms=0, lead_ms=0, delay_ms_max=0, epoch=1, taken=0, horizon=0, far_first=0, far_length=0, arrival_of_taken=0,
    rows_in=0, rows_out=0, rescued=0, table="", bulk="", commands=(), gone=(),
)  # fmt: skip


def lived(folder: Path) -> None:
    """Batches in every tier, cancels by both keys, promotions and merges."""
    world = World(folder)
    world.pipeline.merge_limits = merging.Limits(soon_files=3, later_files=3)
    dues = [*range(BEGIN + 3 * MINUTE_MS, BEGIN + 9 * MINUTE_MS, 1_000), *[BEGIN + 5 * DAY_MS] * 40]
    world.send("first", [*dues, *[BEGIN + 2 * HOUR_MS + 7] * 100])
    world.batch()
    world.cancel("first-u300", dues[300], "unique")
    world.cancel("first-k301", dues[301], "key")
    world.cancel("first-u375", dues[375], "unique")  # five days ahead
    world.move("first-u374", BEGIN + 4 * DAY_MS)
    world.move("first-u420", BEGIN + 2 * HOUR_MS + 7)
    world.send("second", [BEGIN + 20 * MINUTE_MS + n for n in range(50)])
    world.pass_minutes(4)
    world.move("second-u3", BEGIN + MINUTE_MS)
    for n in range(3):
        world.send(f"more{n}", [BEGIN + DAY_MS + n, BEGIN + 40 * DAY_MS])
        world.pass_minutes(1)
    world.send("untaken", [BEGIN + 3 * HOUR_MS])
    world.close()


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("table") / "lived"
    lived(folder)
    return folder


@pytest.fixture
def copy(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "copy"))


def check(folder: Path) -> Report:
    return check_folder(RealDisk(folder))


def messages(folder: Path) -> Path:
    return folder / "table" / "messages"


# -- what is right ----------------------------------------------------------------------------------------------


def test_what_a_pipeline_leaves_is_ok(copy: Path) -> None:
    tiers_there = {name.partition("-")[0] for name in Table(str(messages(copy))).files}
    assert {"hour", "month"} <= tiers_there
    report = check(copy)
    assert report.ok, report.findings
    assert report.numbers["files of the table"] >= 3
    # 40 and 100 of the first, a cancel and two moves for them, 50 of the second, two for each of three more.
    assert report.numbers["rows of the table that wait"] >= 40 + 100 + 1 + 4 + 50 + 6
    assert report.numbers["rows of the table equal to the log"] == report.numbers["rows of the table"]


def test_the_check_changes_nothing(copy: Path) -> None:
    def listed() -> dict[str, bytes]:
        return {str(path): path.read_bytes() for path in (copy / "table").rglob("*") if path.is_file()}

    before = listed()
    check(copy)
    assert listed() == before


def test_a_batch_that_was_not_staged_is_ok(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(tmp_path / "data")
    world.send("first", [BEGIN + HOUR_MS + n for n in range(20)])
    world.batch()
    world.send("second", [BEGIN + HOUR_MS + n for n in range(20)])

    def register_another(step: str) -> None:
        if step == "stage.call":  # ours has written the table by now, but may not stage any more
            monkeypatch.undo()
            world.registered()

    monkeypatch.setattr("postdate.spark.pipeline.batch.reach", register_another)
    with pytest.raises(Refused):
        world.batch()
    world.close()
    report = check(tmp_path / "data")
    assert report.ok, report.findings
    assert (report.numbers["rows of the table"], report.numbers["rows of the table that wait"]) == (40, 20)


def test_an_entry_that_a_crash_has_cut_is_counted(copy: Path) -> None:
    log = messages(copy) / "_delta_log"
    newest = parse_versions(os.listdir(log))[-1]
    (messages(copy) / entry_path(newest + 1)).write_bytes((messages(copy) / entry_path(newest)).read_bytes()[:50])
    report = check(copy)
    assert report.ok, report.findings
    assert report.numbers["entries of the Delta log that a crash has cut"] == 1


def test_a_checkpoint_that_a_crash_has_cut_is_counted(copy: Path) -> None:
    DeltaTable(str(messages(copy))).create_checkpoint()
    changed(copy, lambda rows: rows)
    DeltaTable(str(messages(copy))).create_checkpoint()
    first, checkpoint = sorted((messages(copy) / "_delta_log").glob("*.checkpoint.parquet"))
    for version in range(int(first.name[:20])):
        (messages(copy) / entry_path(version)).unlink()
    checkpoint.write_bytes(checkpoint.read_bytes()[:100])
    report = check(copy)
    assert report.ok, report.findings
    assert report.numbers["checkpoints of the Delta log that a crash has cut"] == 1
    first.unlink()
    assert any("cannot be read" in finding for finding in check(copy).findings)


def test_a_file_that_no_batch_has_named_is_no_damage(copy: Path) -> None:
    (messages(copy) / "soon-of-a-batch-that-failed.parquet").write_bytes(b"PAR1")
    assert check(copy).ok


def test_a_pipeline_that_has_only_registered_needs_no_table(tmp_path: Path) -> None:
    world = World(tmp_path / "data")
    world.close()
    shutil.rmtree(tmp_path / "data" / "table")
    assert check(tmp_path / "data").ok


def test_a_table_in_an_object_store_is_passed_over(tmp_path: Path) -> None:
    world = World(tmp_path / "data")
    world.control.register("s3://bucket/table", "here")
    world.close()
    report = check(tmp_path / "data")
    assert report.ok
    assert "files of the table" not in report.numbers


@pytest.mark.parametrize("form", ["{}", "file://{}"])
def test_a_table_elsewhere_is_found_where_the_pipeline_said(form: str, tmp_path: Path) -> None:
    world = World(tmp_path / "data")
    world.send("first", [BEGIN + HOUR_MS])
    world.batch()
    world.control.register(form.format(tmp_path / "elsewhere"), "here")
    world.close()
    (tmp_path / "data" / "table").rename(tmp_path / "elsewhere")
    report = check(tmp_path / "data")
    assert report.ok, report.findings
    assert report.numbers["rows of the table that wait"] == 1


def test_rows_whose_far_rows_and_records_are_gone_are_ok(tmp_path: Path) -> None:
    world = World(tmp_path / "data", retention_ms=1_000, segment_bytes=1 << 16, batch_bytes_max=1 << 14)
    world.send("first", [BEGIN + DAY_MS + n for n in range(2_000)])
    world.batch()
    for n in range(3):
        world.send(f"more{n}", [BEGIN + DAY_MS + n])
        world.pass_minutes(1)
        world.served.call(lambda: snapshot(world.broker))
    assert world.served.call(lambda: world.broker.retain(world.clock.now_ms() + HOUR_MS)) > 3
    world.close()
    report = check(tmp_path / "data")
    assert report.ok, report.findings
    assert report.numbers["rows of the table"] == 2_003
    assert report.numbers["rows of the table equal to the log"] < 2_003
    again(tmp_path / "data", 0)
    assert any("is in the table more than once" in finding for finding in check(tmp_path / "data").findings)


# -- what the pipeline makes good --------------------------------------------------------------------------------


def restarted(folder: Path) -> None:
    """A pipeline registers, proves and restores, and does a batch."""
    world = World(folder, at_ms=BEGIN + 7 * MINUTE_MS)
    world.batch()
    world.close()


def test_a_file_that_was_moved_away_is_made_again_from_the_log(copy: Path) -> None:
    before = check(copy).numbers["rows of the table that wait"]
    (messages(copy) / largest(copy).path).unlink()
    restarted(copy)
    report = check(copy)
    assert report.ok, report.findings
    assert report.numbers["rows of the table that wait"] >= before


def test_a_table_that_is_gone_is_made_again_from_the_log(copy: Path) -> None:
    before = check(copy).numbers["rows of the table that wait"]
    shutil.rmtree(messages(copy))
    restarted(copy)
    report = check(copy)
    assert report.ok, report.findings
    assert report.numbers["rows of the table that wait"] >= before


def test_a_backup_of_the_table_catches_up_from_the_log(tmp_path: Path) -> None:
    world = World(tmp_path / "data")
    world.send("first", [BEGIN + HOUR_MS + n for n in range(20)])
    world.batch()
    shutil.copytree(messages(tmp_path / "data"), tmp_path / "backup")
    world.send("second", [BEGIN + HOUR_MS + n for n in range(20)])
    world.pass_minutes(2)
    world.close()
    shutil.rmtree(messages(tmp_path / "data"))
    (tmp_path / "backup").rename(messages(tmp_path / "data"))
    assert not check(tmp_path / "data").ok
    restarted(tmp_path / "data")
    report = check(tmp_path / "data")
    assert report.ok, report.findings
    assert report.numbers["rows of the table that wait"] == 40


# -- damage -----------------------------------------------------------------------------------------------------


def largest(folder: Path) -> File:
    return max(Table(str(messages(folder))).files.values(), key=lambda file: file.bytes)


def changed(folder: Path, change: Callable[[pa.Table], pa.Table], **said: Any) -> None:
    """Puts a changed copy in the place of the largest file; `said` is what the Delta log is told instead."""
    table, old = Table(str(messages(folder))), largest(folder)
    rows = change(pq.read_table(messages(folder) / old.path, schema=SCHEMA))
    table.commit([written(table.folder, "hour-changed.parquet", rows, **said)], [old])


def written(place: TableFolder, name: str, rows: pa.Table, /, **said: Any) -> WrittenFile:
    pq.write_table(rows, place.path(name), **writer_options(name))
    due, arrival = (pc.min_max(rows[column]).as_py() for column in ("due", "arrival"))
    true = File(
        name, os.path.getsize(place.path(name)), rows.num_rows, due["min"], due["max"], arrival["min"], arrival["max"]
    )
    return WrittenFile(true._replace(**said), list[RowGroup]())


def again(folder: Path, row: int) -> None:
    """A row of the largest file once more, in a file of its own."""
    table = Table(str(messages(folder)))
    rows = pq.read_table(messages(folder) / largest(folder).path, schema=SCHEMA).slice(row, 1)
    table.commit([written(table.folder, "hour-again.parquet", rows)])


def with_value(rows: pa.Table, name: str, row: int, value: Any) -> pa.Table:
    column = rows[name].to_pylist()
    column[row] = value(column[row]) if callable(value) else value
    return rows.set_column(rows.column_names.index(name), SCHEMA.field(name), pa.array(column, SCHEMA.field(name).type))


def swapped(rows: pa.Table) -> pa.Table:
    return rows.take([1, 0, *range(2, rows.num_rows)])


def without_last(rows: pa.Table) -> pa.Table:
    return rows.slice(0, rows.num_rows - 1)


def without_cancel(folder: Path) -> None:
    table = Table(str(messages(folder)))
    for file in list(table.files.values()):
        rows = pq.read_table(messages(folder) / file.path, schema=SCHEMA)
        kept = rows.filter(pc.not_equal(rows["kind"], CANCEL))
        if kept.num_rows < rows.num_rows:
            table.commit([written(table.folder, f"hour-{file.path}", kept)], [file])


def flipped(record: bytes, position: int) -> bytes:
    return record[:position] + bytes([record[position] ^ 1]) + record[position + 1 :]


def flip_on_disk(folder: Path) -> None:
    path = messages(folder) / largest(folder).path
    path.write_bytes(flipped(path.read_bytes(), 300))


def cut_on_disk(folder: Path) -> None:
    path = messages(folder) / largest(folder).path
    path.write_bytes(path.read_bytes()[:-1])


def spoil_entry(folder: Path) -> None:
    (messages(folder) / entry_path(parse_versions(os.listdir(messages(folder) / "_delta_log"))[-2])).write_bytes(b"{")


def say(folder: Path, far: int) -> None:
    Table(str(messages(folder))).commit(far=far)


def without_statistics(folder: Path) -> None:
    path = messages(folder) / largest(folder).path
    rows = pq.read_table(path, schema=SCHEMA)
    table, old = Table(str(messages(folder))), largest(folder)
    new = written(table.folder, "hour-silent.parquet", rows)
    pq.write_table(rows, table.folder.path("hour-silent.parquet"), write_statistics=False)
    silent = new.file._replace(bytes=os.path.getsize(table.folder.path("hour-silent.parquet")))
    table.commit([WrittenFile(silent, [])], [old])


def without_numbers(folder: Path) -> None:
    """The Delta log's entry loses the statistics of its files."""
    changed(folder, lambda rows: rows)
    newest = messages(folder) / entry_path(parse_versions(os.listdir(messages(folder) / "_delta_log"))[-1])
    lines = [json.loads(line) for line in newest.read_text().splitlines()]
    for line in lines:
        line.get("add", {}).pop("stats", None)
    newest.write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_no_damage_no_finding(copy: Path) -> None:
    """The helpers below plant what they say and nothing else."""
    changed(copy, lambda rows: rows)
    assert check(copy).findings == []


MIDDLE = 20
DAMAGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "missing file": (lambda f: (messages(f) / largest(f).path).unlink(), "it is missing, the Delta log says"),
    "cut file": (cut_on_disk, "bytes, the Delta log says"),
    "flipped bit": (flip_on_disk, "cannot be read: "),
    "spoilt entry": (spoil_entry, "messages cannot be read: "),
    "no table": (lambda f: shutil.rmtree(messages(f)), "messages is missing; "),
    "other columns": (lambda f: changed(f, lambda rows: rows.drop_columns("tag")), "others belong there"),
    "order": (lambda f: changed(f, swapped), "does not stand behind"),
    "row count": (lambda f: changed(f, lambda rows: rows, rows=1), "its count of rows is "),
    "smallest due": (lambda f: changed(f, lambda rows: rows, due_low=5), "its smallest due is "),
    "largest due": (lambda f: changed(f, lambda rows: rows, due_high=5), "its largest due is "),
    "smallest arrival": (lambda f: changed(f, lambda rows: rows, arrival_low=5), "its smallest arrival is "),
    "largest arrival": (lambda f: changed(f, lambda rows: rows, arrival_high=5), "its largest arrival is "),
    "row group": (without_statistics, "its statistics say None"),
    "no numbers": (without_numbers, "does not say which due"),
    "twice": (lambda f: again(f, MIDDLE), "is in the table more than once: hour-"),
    "row lost": (lambda f: changed(f, without_last), "was taken and waits, but is not in the table"),
    "waiting": (lambda f: changed(f, without_last), "by the log it must be "),
    "cancel lost": (without_cancel, "is not in the table: "),
    "place before": (lambda f: say(f, 5), "says that it has taken 5 far rows"),
    "place behind": (lambda f: say(f, 10_000), "says that it has taken 10000 far rows"),
    "foreign row": (
        lambda f: changed(f, lambda rows: with_value(rows, "arrival", MIDDLE, lambda old: old + 1)), "no far row has",
    ),
    "due": (
        lambda f: changed(f, lambda rows: with_value(rows, "due", rows.num_rows - 1, lambda old: old + 1)),
        "the properties ",
    ),
    "queue": (lambda f: changed(f, lambda rows: with_value(rows, "queue", MIDDLE, 77)), "it does not fit its far row"),
    "level": (lambda f: changed(f, lambda rows: with_value(rows, "level", MIDDLE, 7)), "it does not fit its far row"),
    "kind": (lambda f: changed(f, lambda rows: with_value(rows, "kind", MIDDLE, 7)), "of kind 7"),
    "not a cancel": (lambda f: changed(f, lambda rows: with_value(rows, "kind", MIDDLE, CANCEL)), "is no cancel"),
    "topic": (lambda f: changed(f, lambda rows: with_value(rows, "topic", MIDDLE, "other")), "its topic, key and tag"),
    "key": (lambda f: changed(f, lambda rows: with_value(rows, "key", MIDDLE, "other")), "its topic, key and tag"),
    "tag": (lambda f: changed(f, lambda rows: with_value(rows, "tag", MIDDLE, None)), "its topic, key and tag"),
    "unique": (
        lambda f: changed(f, lambda rows: with_value(rows, "unique_hash", MIDDLE, 7)), "not that of the unique key",
    ),
    "first key": (lambda f: changed(f, lambda rows: with_value(rows, "key_hash", MIDDLE, 7)), "not that of the first"),
    "tag hash": (lambda f: changed(f, lambda rows: with_value(rows, "tag_hash", MIDDLE, 7)), "the row's tag hash is 7"),
    "record": (
        # In the time of birth, which no sum of the record covers.
        lambda f: changed(f, lambda rows: with_value(rows, "record", MIDDLE, lambda old: flipped(old, 47))),
        "its record is not the one that the log has",
    ),
    "body": (
        lambda f: changed(f, lambda rows: with_value(rows, "record", MIDDLE, lambda old: flipped(old, 90))), "crc",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGES)
def test_damage_is_found_and_named(name: str, copy: Path) -> None:
    damage, sentence = DAMAGES[name]
    damage(copy)
    findings = check(copy).findings
    assert any(sentence in finding for finding in findings), findings


# -- whose it is ------------------------------------------------------------------------------------------------


def test_another_brokers_table_is_found(copy: Path) -> None:
    (copy / "IDENTITY").write_text("5" * 32)
    (finding,) = check(copy).findings
    assert finding.startswith(f"the table {messages(copy)} belongs to another broker: its identity is ")


def test_a_table_that_has_seen_another_log_is_found(copy: Path) -> None:
    table = Table(str(messages(copy)))
    table.see(STATE._replace(position=table.marks.position, mark=table.marks.mark ^ 1))
    table.commit()
    (finding,) = check(copy).findings
    assert "knows more than the log: it has seen the batch at" in finding
