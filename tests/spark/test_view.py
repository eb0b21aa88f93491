"""The view `pending` on real Spark: all that waits, wherever it is on its way, and nothing else."""

import json
import random
import re
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from postdate import cli
from postdate.arrival import own_arrival
from postdate.cli import sql
from postdate.client.errors import Unreachable
from postdate.errors import UsageError
from postdate.spark.executor.waiting import COLUMNS
from postdate.spark.pending import query
from postdate.spark.pending.view import VIEW, living_rows, pending
from postdate.table.format import CANCEL, DROP, MESSAGE, MOVE, SCHEMA
from postdate.table.living import Removals
from tests.support.core import HOUR_MS, MINUTE_MS, TOPIC
from tests.support.pipeline import BEGIN, World

CLI_PAGE = Path(__file__).parents[2] / "docs" / "cli.md"
FIVE, HOUR = BEGIN + 5 * MINUTE_MS, BEGIN + HOUR_MS


def names(spark: Any, world: World, where: str = "true") -> list[str]:
    pending(spark, world.control).createOrReplaceTempView(VIEW)
    rows = spark.sql(f"select cast(body as string) as body from {VIEW} where {where} order by due, arrival").collect()
    return [row.body for row in rows]


def test_the_view_has_what_waits_at_every_step(tmp_path: Path, spark: Any) -> None:
    world = World(tmp_path)
    try:
        world.send("a", [FIVE, FIVE + 1, HOUR, HOUR + 1])
        everything = ["a 0", "a 1", "a 2", "a 3"]
        assert names(spark, world) == everything, "in the far queue"
        world.batch()
        assert names(spark, world) == everything, "in the table"
        world.cancel("a-u2", HOUR, "unique")
        world.batch()
        world.cancel("a-k3", HOUR + 1, "key")
        world.send("b", [HOUR])
        assert names(spark, world) == ["a 0", "a 1", "b 0"], "one cancel is in the table, one in the far queue"
        world.move("a-u0", FIVE + 2)
        assert names(spark, world) == ["a 1", "a 0", "b 0"], "the move is in the far queue"
        world.batch()
        assert names(spark, world) == ["a 1", "a 0", "b 0"], "and in the table"
        world.move("a-u0", FIVE - 1)
        world.pass_minutes(4)
        world.send("c", [world.clock.now_ms() + 1_000])
        assert names(spark, world) == ["c 0", "a 0", "a 1", "b 0"], "in a chunk and in the wheel, and one in the table"
        chosen = (
            f"due > timestamp_millis({FIVE}) and properties['UNIQ_KEY'] like 'a-%' and tag = 'a' and key like 'a-k1%'"
        )
        assert names(spark, world, chosen) == ["a 1"]
        world.served.call(lambda: world.broker.delete_topic(TOPIC, world.clock.now_ms()))
        assert names(spark, world) == []
    finally:
        world.close()


def test_spark_finds_the_messages_that_columns_find(spark: Any) -> None:
    """The rule of table/living.py, as Spark runs its SQL."""
    dice = random.Random(7)
    arrivals = [*range(1, 60), *(own_arrival(job, 0, row) for job in range(4) for row in range(10))]
    kinds = [*[MESSAGE] * 8, CANCEL, DROP, MOVE]
    rows = [
        {
            "due": dice.randint(1, 5), "arrival": dice.choice(arrivals), "kind": dice.choice(kinds),
            "topic": dice.choice("ab"), "queue": 0, "level": 0, "tag_hash": dice.randint(0, 4),
            "unique_hash": dice.choice([0, 5, -6, 7, 8]), "key_hash": dice.choice([0, 5, -6, 9]), "key": None,
            "tag": None, "size": number, "record": b"",
        }
        for number in range(1_500)
    ]  # fmt: skip
    table = pa.Table.from_pylist(rows, pa.schema([SCHEMA.field(name) for name in COLUMNS]))
    messages = table.filter(pc.equal(table["kind"], MESSAGE))
    wanted = messages.filter(Removals.of(table).living(messages))["size"].to_pylist()
    frame = spark.createDataFrame(table)
    found = living_rows(frame, frame.filter("false")).select("size").toArrow()["size"].to_pylist()
    assert 0 < len(wanted) < messages.num_rows
    assert sorted(found) == wanted


def test_rows_that_were_rescued_are_there_once(tmp_path: Path, spark: Any) -> None:
    """The table has them, and the wheel."""
    world = World(tmp_path)
    try:
        world.send("a", [FIVE, HOUR])
        world.batch()
        for _ in range(19):
            world.served.pass_ms(MINUTE_MS // 4)  # and nobody promotes
            world.served.settle()
        assert world.broker.rescuer.rescued_count == 1
        assert names(spark, world) == ["a 0", "a 1"]
    finally:
        world.close()


def test_columns_are_as_documented(tmp_path: Path, spark: Any) -> None:
    world = World(tmp_path)
    try:
        world.send("a", [HOUR])
        frame = pending(spark, world.control)
        shown = re.findall(
            r"^\| `(\w+)` \| ([\w<>,]+) \|", CLI_PAGE.read_text().partition("\n## sql\n")[2], re.MULTILINE
        )
        assert frame.dtypes == shown[: len(frame.dtypes)]
        (row,) = frame.collect()
        assert (row.topic, row.key, row.body) == (TOPIC, "a-k0 other", b"a 0")
        assert row.size > len(row.body)
        assert row.properties["TIMER_DELIVER_MS"] == str(HOUR)
    finally:
        world.close()


def test_a_query_is_answered_or_refused_with_a_sentence(tmp_path: Path, spark: Any) -> None:
    world = World(tmp_path)
    try:
        world.send("a", [HOUR, HOUR + 1, HOUR + 2])
        found = query.answer_on(spark, "select key, size > 0 as big from pending order by due", world.control, 2)
        assert found == (["key", "big"], [["a-k0 other", True], ["a-k1 other", True]], True)
        assert not query.answer_on(spark, "select 1 from pending", world.control, 3).is_cut
        for wrong, said in [
            ("select colour from pending", "A column, variable, or function parameter with name `colour` cannot be"),
            ("select * from nowhere", "The table or view `nowhere` cannot be found"),
            ("select * form pending", "Syntax error at or near"),
        ]:
            with pytest.raises(UsageError) as error:
                query.answer_on(spark, wrong, world.control, 1)
            assert str(error.value).startswith(said)
            assert "SQLSTATE" not in str(error.value)
    finally:
        world.close()
    with pytest.raises(Unreachable, match=f"no broker at {world.address}"):
        query.answer_on(spark, "select 1 from pending", world.control, 1)


@pytest.mark.full  # the pages of docs/ run it, too
def test_the_command_prints_rows_and_ends(tmp_path: Path) -> None:
    world = World(tmp_path)
    try:
        world.send("a", [HOUR, HOUR])
        asked = "select due, topic, count(*) as n, max(body) as body from pending group by due, topic"
        done = subprocess.run(
            [sys.executable, "-m", "postdate", "sql", asked, "--addr", world.address, "--format", "json"],
            capture_output=True, text=True, timeout=300, check=False,
        )  # fmt: skip
        assert (done.returncode, done.stderr) == (0, "")
        due = datetime.fromtimestamp(HOUR / 1_000, UTC).isoformat()
        assert json.loads(done.stdout) == {"due": due, "topic": TOPIC, "n": 2, "body": "a 1"}
    finally:
        world.close()


def test_what_is_no_query_is_refused_before_spark_starts(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["sql", "drop view pending"]) == 2
    assert "only queries are answered here" in capsys.readouterr().err


def test_rows_are_printed_as_a_table_or_as_csv(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [["orders", 12, b"text", None], ["bills", 3, b"\xff", 1.5]]
    sql._print(["topic", "n", "body", "x"], rows, "table")
    sql._print(["topic", "n", "body", "x"], rows, "csv")
    assert capsys.readouterr().out.splitlines() == [
        "topic    n  body  x", "orders  12  text", "bills    3  ff    1.5",
        "topic,n,body,x", "orders,12,text,", "bills,3,ff,1.5",
    ]  # fmt: skip
