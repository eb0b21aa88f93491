"""`postdate.pending`: what waits, as a DataFrame on the caller's Spark and as an Arrow table without one."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from py4j.protocol import Py4JError, Py4JNetworkError

import postdate
from postdate.errors import PipelineFailed
from postdate.spark.pending import extract, pending, query
from postdate.spark.pending.pending import Request
from postdate.spark.session import java
from tests.support.core import HOUR_MS, TOPIC
from tests.support.pipeline import BEGIN, World

ROOT = Path(__file__).parents[2]
HOUR = BEGIN + HOUR_MS


def waiting(folder: Path) -> World:
    """Three messages in the table, one of them cancelled; one in the far queue, one in the wheel."""
    world = World(folder)
    world.send("a", [HOUR, HOUR + 1, HOUR + 2])
    world.batch()
    world.cancel("a-u1", HOUR + 1, "unique")
    world.send("b", [BEGIN + 1_000, HOUR + 3])
    return world


def request(world: World, folder: Path, where: str = "", columns: tuple[str, ...] = (), limit: int = 0) -> Request:
    target = str(folder / f"rows-{where}-{limit}")
    return Request(world.address, "", where, list(columns), limit, "1g", target)


def ran(script: str, *arguments: str) -> "subprocess.CompletedProcess[str]":
    """A program of a user's, who has installed the package and has not made it the first Python of the PATH."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("PYSPARK_", "SPARK_"))}
    return subprocess.run(
        [sys.executable, "-c", script, *arguments], capture_output=True, text=True, timeout=300, check=False,
        env=environ | {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"},
    )  # fmt: skip


@pytest.mark.full  # the pages of docs/ run it, too
def test_without_a_session_it_is_an_arrow_table(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    world = waiting(tmp_path)
    before = dict(os.environ)
    try:
        found = postdate.pending(address=world.address)
    finally:
        world.close()
    assert isinstance(found, pa.Table)
    assert found.sort_by("due")["body"].to_pylist() == [b"b 0", b"a 0", b"a 2", b"b 1"]
    assert found.schema.field("due").type == pa.timestamp("us", "UTC")
    assert found.schema.metadata is None
    assert dict(os.environ) == before
    assert capfd.readouterr() == ("", "")


def test_rows_and_columns_are_chosen_before_they_are_read(tmp_path: Path, spark: Any) -> None:
    world = waiting(tmp_path / "data")
    try:
        chosen = request(world, tmp_path, "key like 'a-%' and properties['UNIQ_KEY'] like 'a-%'", ("key", "size"))
        extract.extract(spark, world.control, chosen)
        found = pq.read_table(chosen.target)
        assert found.column_names == ["key", "size"]
        assert sorted(found["key"].to_pylist()) == ["a-k0 other", "a-k2 other"]
        first = request(world, tmp_path, limit=2)
        extract.extract(spark, world.control, first)
        assert pq.read_table(first.target)["body"].to_pylist() == [b"b 0", b"a 0"], "those that are due first"
        none = request(world, tmp_path, "false")
        extract.extract(spark, world.control, none)
        assert pq.read_table(none.target).num_rows == 0
        for wrong, said in [
            (request(world, tmp_path, "colour = 1"), "with name `colour` cannot be resolved"),
            (request(world, tmp_path, "topic ="), "Syntax error"),
            (request(world, tmp_path, columns=("colour",)), "with name `colour` cannot be resolved"),
        ]:
            with pytest.raises(postdate.UsageError, match=said):
                extract.extract(spark, world.control, wrong)
    finally:
        world.close()


def test_with_a_session_it_is_a_data_frame_on_it(tmp_path: Path, spark: Any) -> None:
    world = waiting(tmp_path)
    try:
        frame = postdate.pending(spark, address=world.address, bulk=str(world.bulk.address))
        assert frame.sparkSession is spark
        assert frame.where("tag = 'a'").groupBy("topic").count().collect() == [(TOPIC, 4)]
    finally:
        world.close()


PLAIN = """
import sys
from pyspark.sql import SparkSession
import postdate

spark = SparkSession.builder.getOrCreate()
before = spark.sparkContext.pythonExec
rows = postdate.pending(spark, address=sys.argv[1])
assert spark.sparkContext.pythonExec == before
print([bytes(row.body).decode() for row in rows.orderBy("due").collect()])
spark.stop()
"""


@pytest.mark.full  # the pages of docs/ run it, too
def test_a_plain_session_of_a_user_will_do(tmp_path: Path) -> None:
    world = waiting(tmp_path)
    try:
        done = ran(PLAIN, world.address)
    finally:
        world.close()
    assert done.stdout == "['b 0', 'a 0', 'a 2', 'b 1']\n", done.stderr[-2_000:]


def test_what_is_asked_for_wrongly_is_refused_at_once(spark: Any) -> None:
    asked: Any = postdate.pending
    wrong: list[tuple[str, dict[str, Any]]] = [
        ("a list of names", {"columns": "due"}),
        ("at least 1, got 0", {"limit": 0}),
        ("expected host:port", {"bulk": "nowhere"}),
        ("expected host:port", {"address": "nowhere"}),
        ("takes a Spark session", {"spark": "orders"}),
        ("a DataFrame has its own", {"spark": spark, "where": "true"}),
    ]
    for said, named in wrong:
        with pytest.raises(postdate.UsageError, match=said):
            asked(**named)


def test_where_no_broker_answers_it_is_told_in_a_sentence(spark: Any) -> None:
    said = "no broker at 127.0.0.1:1: "
    with pytest.raises(postdate.Unreachable, match=said):
        postdate.pending(address="127.0.0.1:1")
    with pytest.raises(postdate.Unreachable, match=said):
        postdate.pending(spark, address="127.0.0.1:1")


def test_where_there_is_no_java_it_is_told_in_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    world = waiting(tmp_path / "data")
    try:
        monkeypatch.setattr(java, "find", lambda _environ: java.Missing(("PATH /usr: version 8",)))
        monkeypatch.setattr(sys, "argv", ["extract", json.dumps(request(world, tmp_path))])
        assert extract.main() == 1
    finally:
        world.close()
    fault = pending._error_of(capsys.readouterr().err.strip(), 1)
    assert isinstance(fault, PipelineFailed)
    assert str(fault).startswith("no Java 17 or newer was found (PATH /usr: version 8); install one with")


def test_a_spark_that_does_not_start_and_a_process_that_dies_are_told(tmp_path: Path) -> None:
    world = waiting(tmp_path)
    try:
        with pytest.raises(PipelineFailed, match=r"Spark does not start: .*Invalid initial heap size|-Xmx1x"):
            postdate.pending(address=world.address, memory="1x")
    finally:
        world.close()
    assert "ended with code -9: Killed" in str(pending._error_of("Killed", -9))


def test_nothing_of_spark_is_loaded_before_it_is_needed() -> None:
    script = "import sys, postdate; postdate.pending; print('pyspark' in sys.modules)"
    assert ran(script).stdout == "False\n"


# -- Ctrl-C -----------------------------------------------------------------------------------------------------


@pytest.fixture
def no_gateway(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(query, "Gateway", MagicMock())


def fail_after_ctrl_c() -> None:
    """As PySpark does where the connection to Java cannot be made anew."""
    try:
        raise KeyboardInterrupt
    finally:
        try:
            raise Py4JNetworkError("Answer from Java side is empty")
        except Py4JNetworkError:
            raise Py4JError("An error occurred while calling o1.setCallSite") from None


@pytest.mark.usefixtures("no_gateway")
def test_ctrl_c_stays_ctrl_c_when_the_call_to_java_cannot_be_cleaned_up() -> None:
    with pytest.raises(KeyboardInterrupt), query.embedded_spark("1g", os.environ), query.spark_errors():
        fail_after_ctrl_c()


@pytest.mark.usefixtures("no_gateway")
def test_an_error_without_ctrl_c_stays_what_it_is() -> None:
    with pytest.raises(Py4JNetworkError), query.embedded_spark("1g", os.environ), query.spark_errors():
        raise Py4JNetworkError("Answer from Java side is empty")
