"""Imports on real Spark: files and frames into the table, all of them or nothing."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import postdate.spark
from postdate import cli
from postdate.arrival import own_arrival
from postdate.client.errors import BrokerError, Unreachable
from postdate.contract import JobStatus
from postdate.errors import PostdateError, Refused, TopicNotFound, UsageError
from postdate.spark.formats import sink
from postdate.spark.imports import imports, inputs, parquet
from postdate.spark.imports.columns import Wanted
from postdate.spark.imports.options import wanted_of
from postdate.storage import record as records
from postdate.table import delta
from postdate.table.files import TableFolder, sort_rows
from tests.support.core import HOUR_MS, TOPIC
from tests.support.pipeline import BEGIN, World
from verify.faults.process import ROOT

DUE = BEGIN + HOUR_MS
WAIT_S = 60
ENVIRON = os.environ | {"PYTHONPATH": str(ROOT)}  # commands run in folders that have nothing of ours
WANTED = wanted_of({"due": "due", "key": "key", "tag": "tag"})


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    found = World(tmp_path / "data")
    yield found
    found.close()


@pytest.fixture(autouse=True)
def session(spark: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Imports of files run on the session of all tests instead of on one of their own."""

    @contextmanager
    def shared(_memory: str, _environ: Any) -> Iterator[Any]:
        yield spark

    monkeypatch.setattr(inputs, "embedded_spark", shared)
    return spark


def at(due_ms: int) -> datetime:
    return datetime.fromtimestamp(due_ms / 1_000, UTC)


def table_of(count: int, **given: Any) -> pa.Table:
    usual = {
        "due": pa.array([at(DUE + n % 7) for n in range(count)], pa.timestamp("us", "UTC")),
        "body": [f"m {n}" for n in range(count)],
        "key": [f"k{n % 3}" for n in range(count)],
        "tag": pa.array(["a" if n % 2 else None for n in range(count)], pa.string()),
    }
    return pa.table(usual | given)


def saved(path: Path, rows: pa.Table, **options: Any) -> str:
    pq.write_table(rows, path, **options)
    return str(path)


def request(world: World, *paths: str, wanted: Wanted = WANTED, **given: Any) -> inputs.Request:
    usual: dict[str, Any] = {"id": "one", "skip_bad": "", "is_waiting": False, "memory": "1g", "topic": TOPIC}
    return inputs.Request(paths=paths, wanted=wanted, address=world.address, **(usual | given))


def run(asked: inputs.Request, part_rows: int = parquet.PART_ROWS) -> inputs.Outcome:
    return inputs.run(asked, {}, lambda _step, _rows: None, part_rows)


def beside(world: World) -> list[str]:
    """Files that lie beside the table."""
    return [
        name for name in TableFolder(str(world.folder / "table" / "messages")).sizes() if name.startswith("_import")
    ]


def rows_beside(world: World) -> list[dict[str, Any]]:
    tables = [pq.read_table(world.folder / "table" / "messages" / name) for name in beside(world)]
    found: list[dict[str, Any]] = sort_rows(pa.concat_tables(tables)).to_pylist()
    return found


def shown(world: World, queue_id: int) -> list[str]:
    def read() -> list[str]:
        first, end = world.broker.offsets(TOPIC, queue_id)
        pulled = world.broker.pull(TOPIC, queue_id, first, count_max=max(end - first, 1))
        return [records.decode(record).body.decode() for record in pulled.records]

    return world.served.call(read)


# -- files ------------------------------------------------------------------------------------------------------


def test_rows_of_a_file_reach_their_queues_when_they_are_due(world: World, tmp_path: Path) -> None:
    path = saved(tmp_path / "in.parquet", table_of(50), row_group_size=20)
    outcome = run(request(world, path))
    assert (outcome.job.state, outcome.job.rows, outcome.bad_count) == ("waiting", 50, 0)
    world.batch()
    assert world.control.find_job("one").state == "done"
    assert not beside(world)
    assert shown(world, 0) == shown(world, 1) == []
    world.pass_minutes(61)
    bodies = [f"m {n}" for n in sorted(range(50), key=lambda n: (n % 7, n))]
    assert sorted(shown(world, 0) + shown(world, 1)) == sorted(bodies)
    assert shown(world, 0) == [body for body in bodies if int(body[2:]) % 2 == 0]


def test_rows_of_one_due_and_key_keep_the_order_of_their_file(world: World, tmp_path: Path) -> None:
    rows = table_of(2_000, due=pa.array([at(DUE)] * 2_000, pa.timestamp("us", "UTC")))
    path = saved(tmp_path / "in.parquet", rows, row_group_size=100)
    run(request(world, path, wanted=WANTED._replace(queue="key")), part_rows=300)  # so that one file is in many parts
    found = rows_beside(world)
    assert len({row["arrival"] - own_arrival(0) >> 26 for row in found}) > 1
    for key in ("k0", "k1", "k2"):
        mine = [row for row in found if row["key"] == key]
        numbers = [int(records.decode(row["record"]).body[2:]) for row in mine]
        assert numbers == sorted(numbers)
        assert len({row["queue"] for row in mine}) == 1


TEXTS = {
    "csv": 'due,text,key,extra\n2027-01-01T09:00:00+01:00,"one, ""two""\nthree",k1,x\n2027-01-01T08:00:00Z,four,,\n',
    "jsonl": '{"due": "2027-01-01T09:00:00+01:00", "text": "one, \\"two\\"\\nthree", "key": "k1"}\n\n'
    '{"due": "2027-01-01T08:00:00Z", "text": "four"}\n',
}


@pytest.mark.parametrize("kind", TEXTS)
def test_text_files_are_read(kind: str, world: World, tmp_path: Path) -> None:
    path = tmp_path / f"in.{kind}"
    path.write_text(TEXTS[kind])
    outcome = run(request(world, str(path), wanted=wanted_of({"due": "due", "body": "text", "key": "key"})))
    assert (outcome.job.rows, outcome.bad) == (2, [])
    due = int(datetime(2027, 1, 1, 8, tzinfo=UTC).timestamp() * 1_000)
    found = rows_beside(world)
    assert [(row["due"], row["key"]) for row in found] == [(due, "k1"), (due, None)]
    assert [records.decode(row["record"]).body for row in found] == [b'one, "two"\nthree', b"four"]


def test_numbers_zones_and_properties_of_json_lines(world: World, tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text(f'{{"due": {DUE}, "body": "a", "p": {{"x": "1"}}}}\n{{"due": "{DUE}", "body": "b"}}\n')
    run(request(world, str(path), wanted=wanted_of({"due": "due", "unit": "ms", "properties": "p"})))
    found = rows_beside(world)
    assert [row["due"] for row in found] == [DUE, DUE]
    assert records.properties_of(found[0]["record"])["x"] == "1"


def test_several_files_folders_and_patterns_are_one_import(world: World, tmp_path: Path) -> None:
    (tmp_path / "more").mkdir()
    saved(tmp_path / "a1.parquet", table_of(3))
    saved(tmp_path / "a2.parquet", table_of(4))
    saved(tmp_path / "more" / "b.parquet", table_of(5))
    outcome = run(request(world, str(tmp_path / "a*.parquet"), str(tmp_path / "more")))
    assert outcome.job.rows == 12


# -- bad rows ---------------------------------------------------------------------------------------------------


def test_with_a_bad_row_nothing_is_scheduled(world: World, session: Any, tmp_path: Path) -> None:
    bodies = [None if n in (0, 777) else "x" for n in range(1_000)]
    path = saved(tmp_path / "in.parquet", table_of(1_000, body=bodies), row_group_size=100)
    session.conf.set("spark.sql.files.maxPartitionBytes", 4_096)  # rows are counted through all parts of a file
    try:
        outcome = run(request(world, path))
    finally:
        session.conf.unset("spark.sql.files.maxPartitionBytes")
    assert outcome.is_given_up
    assert [(Path(bad.file).name, bad.row) for bad in outcome.bad] == [("in.parquet", 1), ("in.parquet", 778)]
    assert outcome.bad[0].reason == "column body (the body) is null"
    assert (world.control.find_job("one").state, beside(world)) == ("failed", [])
    again = run(request(world, saved(tmp_path / "in.parquet", table_of(3))))
    assert (again.job.state, again.job.rows) == ("waiting", 3)


def test_bad_rows_are_skipped_when_that_is_asked_for(world: World, tmp_path: Path) -> None:
    path, bad = tmp_path / "in.jsonl", tmp_path / "bad.jsonl"
    good = f'{{"due": "{at(DUE).isoformat()}", "body": "ok"}}'
    path.write_text(f'{good}\nno json\n[1]\n{good}\n{{"due": 5, "body": "x"}}\n{{"body": "x"}}\n')
    outcome = run(request(world, str(path), wanted=wanted_of({"due": "due"}), skip_bad=str(bad)))
    assert (outcome.job.rows, outcome.job.bad, outcome.bad_count) == (2, 4, 4)
    told = [json.loads(line) for line in bad.read_text().splitlines()]
    assert [(Path(each["file"]).name, each["row"]) for each in told] == [("in.jsonl", row) for row in (2, 3, 5, 6)]
    assert [each["reason"].partition(":")[0] for each in told] == [
        "the line is no JSON", "the line is a JSON list, expected an object", "column due is a number, expected text",
        "column due (the due time) is null",
    ]  # fmt: skip


def test_a_csv_row_with_too_few_fields_is_bad(world: World, tmp_path: Path) -> None:
    path = tmp_path / "in.csv"
    path.write_text(f"due,body,key\n{at(DUE).isoformat()},one,k\n{at(DUE).isoformat()},two\n")
    outcome = run(request(world, str(path), wanted=wanted_of({"due": "due"})))
    assert [(bad.row, bad.reason) for bad in outcome.bad] == [(2, "the row has not as many fields as the header")]


def test_many_bad_rows_are_counted_and_the_first_are_kept(world: World, tmp_path: Path) -> None:
    path = saved(tmp_path / "in.parquet", table_of(20_001, body=pa.nulls(20_001, pa.string())))
    outcome = run(request(world, path))
    assert outcome.bad_count == 20_001
    assert len(outcome.bad) == 10_000
    lines = imports.bad_lines(outcome.bad, outcome.bad_count)
    assert lines[20:] == ["... and 19,981 more", "20,001 bad rows: nothing is scheduled."]


# -- refused ----------------------------------------------------------------------------------------------------


def test_columns_that_do_not_fit_are_refused_before_anything_is_written(world: World, tmp_path: Path) -> None:
    parquet = saved(tmp_path / "in.parquet", table_of(1, local=[datetime(2027, 1, 1)]))
    lines = tmp_path / "in.jsonl"
    lines.write_text('{"at": "x", "body": 5}\n')
    for path, wishes, sentence in [
        (parquet, {"due": "when"}, "due: there is no column when; there are: due, body, key, tag, local"),
        (parquet, {"due": "local"}, "due: column local is a timestamp without a zone"),
        (str(lines), {"due": "when"}, "due: there is no column when; there are: at, body"),
        (str(lines), {"due": "at"}, "body: column body is number, expected text"),
    ]:
        with pytest.raises(UsageError) as error:
            run(request(world, path, wanted=wanted_of(wishes)))
        assert str(error.value).startswith(sentence)
    with pytest.raises(BrokerError, match="there is no job 'one'"):
        world.control.find_job("one")


def test_files_that_are_not_there_or_of_two_kinds_are_refused(tmp_path: Path) -> None:
    for paths, sentence in [
        (["/nowhere/x.csv"], "/nowhere/x.csv: there is no such file"),
        ([saved(tmp_path / "a.parquet", table_of(1)), str(tmp_path / "b.txt")], "b.txt: there is no such file"),
        ([str(Path(__file__))], "expected files whose names end in .parquet, .csv, .jsonl, .ndjson"),
    ]:
        with pytest.raises(UsageError, match=re.escape(sentence)):
            inputs.kind_of(paths)
    (tmp_path / "c.csv").write_text("a\n")
    with pytest.raises(UsageError, match="files of one kind at a time"):
        inputs.kind_of([str(tmp_path / "a.parquet"), str(tmp_path / "c.csv")])


def test_a_broker_that_is_away_or_refuses_is_told(world: World, tmp_path: Path) -> None:
    path = saved(tmp_path / "in.parquet", table_of(1))
    with pytest.raises(TopicNotFound, match="nowhere"):
        run(request(world, path, topic="nowhere"))
    with pytest.raises(Unreachable, match=r"no broker at 127\.0\.0\.1:1"):
        run(request(world, path)._replace(address="127.0.0.1:1"))


# -- ids --------------------------------------------------------------------------------------------------------


def test_the_same_id_again_answers_with_the_first_result(world: World, tmp_path: Path) -> None:
    path = saved(tmp_path / "in.parquet", table_of(5))
    run(request(world, path))
    names = beside(world)
    again = run(request(world, saved(tmp_path / "in.parquet", table_of(9))))
    assert (again.job.state, again.job.rows, beside(world)) == ("waiting", 5, names)
    world.batch()
    done = run(request(world, path, is_waiting=True))
    assert (done.job.state, done.job.rows, beside(world)) == ("done", 5, [])


def test_an_import_that_died_is_loaded_again_from_the_start(world: World, tmp_path: Path) -> None:
    begun = imports.begin(world.control, "one", TOPIC, WANTED)
    assert begun.plan is not None
    left = Path(begun.plan.folder) / f"{begun.plan.stem}soon-{'0' * 32}.parquet"
    left.write_bytes(b"half a file")
    outcome = run(request(world, saved(tmp_path / "in.parquet", table_of(5))))
    assert (outcome.job.number, outcome.job.rows, left.exists()) == (begun.job.number, 5, False)


def test_two_imports_at_once_keep_to_their_own_files(world: World, tmp_path: Path) -> None:
    other = imports.begin(world.control, "one-soon", TOPIC, WANTED)
    assert other.plan is not None
    left = Path(other.plan.folder) / f"{other.plan.stem}soon-{'0' * 32}.parquet"
    left.write_bytes(b"of the other")
    path = saved(tmp_path / "in.parquet", table_of(5))
    threads = [threading.Thread(target=run, args=(request(world, path, id=name),)) for name in ("one", "two")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert left.exists()
    left.unlink()
    assert len(rows_beside(world)) == 10
    assert {world.control.find_job(name).state for name in ("one", "two")} == {"waiting"}


def test_files_that_another_try_has_removed_are_not_adopted(world: World, session: Any, tmp_path: Path) -> None:
    begun = imports.begin(world.control, "one", TOPIC, WANTED)
    assert begun.plan is not None
    frame, wanted = inputs.frame_of(session, "parquet", [saved(tmp_path / "in.parquet", table_of(5))], WANTED)
    (loaded,) = inputs.load_frame(frame, begun.plan._replace(wanted=wanted))
    imports.begin(world.control, "one", TOPIC, WANTED)
    with pytest.raises(Refused, match="is another import with the id one running"):
        imports.adopt(world.control, begun.plan, loaded.files, 0)


# -- frames -----------------------------------------------------------------------------------------------------


def written(spark: Any, world: World, frame: Any, **options: Any) -> None:
    postdate.spark.register(spark)
    usual = {"topic": TOPIC, "due": "due", "addr": world.address, "id": "one", "wait": "false"}
    frame.write.format("postdate").mode("append").options(**(usual | options)).save()


def test_a_frame_is_scheduled_all_of_it(world: World, spark: Any) -> None:
    frame = spark.createDataFrame(table_of(100)).repartition(3)
    written(spark, world, frame, key="key", tag="tag", property="Customer=key")
    assert (world.control.find_job("one").state, world.control.find_job("one").rows) == ("waiting", 100)
    found = rows_beside(world)
    assert {row["arrival"] - own_arrival(0) >> 26 for row in found} == {0, 1, 2}
    assert records.properties_of(found[0]["record"])["Customer"] == found[0]["key"]
    world.batch()
    written(spark, world, frame, wait="true")
    assert (world.control.find_job("one").state, beside(world)) == ("done", [])


def test_a_frame_with_a_bad_row_leaves_nothing(world: World, spark: Any) -> None:
    frame = spark.createDataFrame(table_of(10, body=[None, *["x"] * 9])).coalesce(1)
    with pytest.raises(Exception, match=r"part 0, row 1: column body \(the body\) is null"):
        written(spark, world, frame)
    assert (world.control.find_job("one").state, beside(world)) == ("failed", [])


def test_a_frame_that_fails_leaves_nothing(world: World, spark: Any) -> None:
    folder, rows = str(world.folder / "table" / "messages"), table_of(1_000).select(["due", "body"])

    def failing(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """One part is loaded, and the other one fails then."""
        for batch in batches:
            if batch.column("id")[0].as_py() == 0:
                yield from rows.to_batches()
                return
            end = time.monotonic() + WAIT_S
            while not any(name.startswith("_import-one-") for name in os.listdir(folder)):
                assert time.monotonic() < end, "nobody has loaded the other part"
                time.sleep(0.01)
            raise ValueError("enough")

    frame = spark.range(0, 2, 1, 2).mapInArrow(failing, "due timestamp, body string")
    with pytest.raises(Exception, match="enough"):
        written(spark, world, frame)
    assert (world.control.find_job("one").state, beside(world)) == ("failed", [])


def test_what_a_task_wrote_for_an_import_that_is_over_goes_from_time_to_time(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Spark does not wait for the other tasks of a job that has failed."""
    monkeypatch.setattr(delta, "_CHECKPOINT_EVERY", 5)
    begun = [imports.begin(world.control, name, TOPIC, WANTED).plan for name in ("one", "two")]
    names = []
    for plan in begun:
        assert plan is not None
        names.append(f"{plan.stem}soon-{'0' * 32}.parquet")
        if plan.job.id == "one":
            assert imports.give_up(world.control, plan, "the job of Spark has failed")
        (Path(plan.folder) / names[-1]).write_bytes(b"written behind that")
    batches = 0
    while names[0] in beside(world):
        world.send(f"more-{batches}", [DUE])
        world.batch()
        batches += 1
        assert batches <= 10, "it is still there"
    assert beside(world) == names[1:], "what is still loaded stays"


def test_a_file_that_somebody_else_removes_meanwhile_ends_no_pipeline(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = imports.begin(world.control, "one", TOPIC, WANTED).plan
    assert plan is not None
    left = Path(plan.folder) / f"{plan.stem}soon-{'0' * 32}.parquet"
    left.write_bytes(b"of an import that is given up")
    jobs = world.control.jobs

    def given_up() -> list[JobStatus]:
        """Between what the pipeline has listed and what it removes."""
        assert imports.give_up(world.control, plan, "the job of Spark has failed")
        assert not left.exists()
        return jobs()

    monkeypatch.setattr(world.control, "jobs", given_up)
    world.registered()


def test_an_abort_behind_an_adoption_changes_nothing(world: World, spark: Any) -> None:
    written(spark, world, spark.createDataFrame(table_of(3)))
    plan = imports.begin(world.control, "two", TOPIC, WANTED).plan
    assert plan is not None
    plan = plan._replace(job=plan.job._replace(id="one"), stem="_import-one-")
    assert not imports.give_up(world.control, plan, "the answer was lost")
    assert len(rows_beside(world)) == 3


def test_options_that_are_wrong_are_told(world: World, spark: Any) -> None:
    frame = spark.createDataFrame(table_of(1))
    for options, sentence in [
        ({"colour": "red"}, "option colour is not known, expected one of addr, bulk, topic, due"),
        ({"due": "when"}, "due: there is no column when"),
        ({"wait": "perhaps"}, "option wait is 'perhaps', expected true or false"),
        ({"topic": "nowhere"}, "nowhere"),
    ]:
        with pytest.raises(Exception, match=sentence):
            written(spark, world, frame, **options)
    with pytest.raises(UsageError, match="messages can only be added"):
        sink.writer({}, frame.schema, overwrite=True)


# -- the command ------------------------------------------------------------------------------------------------


def command(world: World, *words: str) -> list[str]:
    address = world.address
    return [sys.executable, "-m", "postdate", "import", *words, "--topic", TOPIC, "--due", "due", "--addr", address]


@pytest.mark.full  # the pages of docs/ run it, too
def test_the_command_schedules_and_says_so(world: World, tmp_path: Path) -> None:
    path = saved(tmp_path / "in.parquet", table_of(10))
    process = subprocess.Popen(
        command(world, path, "--id", "x"), stdout=subprocess.PIPE, text=True, cwd=tmp_path, env=ENVIRON
    )
    deadline = time.monotonic() + 120
    while process.poll() is None and time.monotonic() < deadline:
        world.batch()
        time.sleep(0.2)
    assert process.communicate()[0].startswith("10 rows scheduled, 0 bad, in ")
    assert process.returncode == 0


@pytest.mark.full  # the pages of docs/ run it, too
def test_the_command_tells_bad_rows_and_ends_with_1(world: World, tmp_path: Path) -> None:
    path = saved(tmp_path / "in.parquet", table_of(2, body=[None, "x"]))
    done = subprocess.run(
        command(world, path), capture_output=True, text=True, check=False, timeout=200, cwd=tmp_path, env=ENVIRON
    )
    assert (done.returncode, done.stdout) == (1, "")
    first, *lines = done.stderr.splitlines()
    assert re.fullmatch(r"import (\w+): repeat with --id \1 if this is interrupted", first)
    assert lines[0].endswith("in.parquet, row 1: column body (the body) is null")
    assert lines[1] == "1 bad row: nothing is scheduled."


@pytest.mark.full
def test_the_command_tells_what_spark_could_not_read_and_leaves_nothing(world: World, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    saved(tmp_path / "in" / "a.parquet", table_of(500_000))
    whole = (tmp_path / "in" / "a.parquet").read_bytes()
    (tmp_path / "in" / "b.parquet").write_bytes(whole[:1_000] + bytes(20_000) + whole[21_000:])
    done = subprocess.run(
        command(world, str(tmp_path / "in"), "--id", "x"), capture_output=True, text=True, check=False, timeout=200,
        cwd=tmp_path, env=ENVIRON,
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (3, "", 1)
    assert done.stderr.startswith("postdate: ")
    assert "b.parquet" in done.stderr, done.stderr
    assert (world.control.find_job("x").state, beside(world)) == ("failed", [])


@pytest.mark.full
def test_ctrl_c_gives_an_import_up_while_it_loads(world: World, tmp_path: Path) -> None:
    path = saved(tmp_path / "in.parquet", table_of(3_000_000))
    ended = interrupted(world, path, lambda: bool(beside(world)))
    assert ended == (130, "postdate: import x is given up: nothing is scheduled\n")
    assert (world.control.find_job("x").state, beside(world)) == ("failed", [])


@pytest.mark.full
def test_ctrl_c_leaves_an_import_that_is_adopted(world: World, tmp_path: Path) -> None:
    path = saved(tmp_path / "in.parquet", table_of(3))
    # When the broker has it, its owner is told half a second later at the most, and waits.
    ended = interrupted(world, path, lambda: _state(world) == "waiting", pause_s=0.5)
    assert ended == (130, "postdate: import x goes on without us: see postdate jobs\n")
    assert len(rows_beside(world)) == 3


@pytest.mark.full
def test_ctrl_c_gives_an_import_up_when_java_is_gone_right_after_it(world: World, tmp_path: Path) -> None:
    path = saved(tmp_path / "in.parquet", table_of(3_000_000))
    ended = interrupted(world, path, lambda: bool(beside(world)), then=kill_java)
    assert ended == (130, "postdate: import x is given up: nothing is scheduled\n")
    assert world.control.find_job("x").state == "failed"


def kill_java(command_pid: int) -> None:
    """Kills the Java of a command, which has a number of its own and may be on its way out."""
    children = Path(f"/proc/{command_pid}/task/{command_pid}/children").read_text().split()
    (java,) = (int(pid) for pid in children if b"java" in Path(f"/proc/{pid}/cmdline").read_bytes())
    os.kill(java, signal.SIGKILL)


def interrupted(
    world: World, path: str, is_time: Callable[[], bool], pause_s: float = 0.0,
    then: Callable[[int], None] = lambda _pid: None,
) -> tuple[int, str]:  # fmt: skip
    """Ctrl-C for the command when it is time for that, and what comes right after it: how it ends, and what it says."""
    process = subprocess.Popen(
        command(world, path, "--id", "x"), stderr=subprocess.PIPE, text=True, cwd=Path(path).parent, env=ENVIRON,
        process_group=0,
    )  # fmt: skip
    deadline = time.monotonic() + 120
    while not is_time() and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(pause_s)
    process.send_signal(signal.SIGINT)
    then(process.pid)
    said = process.communicate(timeout=120)[1]
    return process.returncode, said


def _state(world: World) -> str:
    try:
        return str(world.control.find_job("x").state)
    except PostdateError:
        return ""


def test_wrong_usage_is_told_before_spark_starts(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["import", "x.csv", "--topic", "a", "--due", "at", "--zone", "Nowhere/Land"]) == 2
    assert "zone 'Nowhere/Land' is not known" in capsys.readouterr().err
