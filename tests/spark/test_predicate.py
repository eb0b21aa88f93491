"""What a predicate or a query must not do to Spark's process, its files and its memory: attacks, tried end to end."""

import re
from pathlib import Path
from typing import Any

import pytest

from postdate.check import check_folder
from postdate.errors import UsageError
from postdate.spark.pending import query
from postdate.spark.pending.predicate import FUNCTIONS, check_predicate
from postdate.spark.pending.view import pending
from postdate.storage.disk import RealDisk
from tests.spark.test_jobs import HOUR, ask, waiting
from tests.support.core import HOUR_MS
from tests.support.pipeline import World

SECRET = "a line that nobody may learn"


@pytest.fixture
def secret(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("pipeline") / "secret.txt"
    path.write_text(SECRET + "\n", encoding="utf-8")
    return path


@pytest.fixture
def world(tmp_path: Path, spark: Any) -> Any:
    world = World(tmp_path, spark=spark)
    yield world
    world.close()
    report = check_folder(RealDisk(tmp_path))
    assert not report.findings, report.findings


# Each would answer something, or do something, that is none of the asker's business. `{file}` is the secret's.
ATTACKS = {
    "a file exists": "exists(select 1 from text.`{file}`)",
    "a file says": "exists(select 1 from text.`{file}` where value like 'a line%')",
    "a file in an error": "raise_error((select max(value) from text.`{file}`)) is null",
    "a file as a scalar": "key < (select max(value) from text.`{file}`)",
    "a file in a list": "key in (select value from csv.`{file}`)",
    "the table's own file": "input_file_name() like '%secret%'",
    "an environment": "java_method('java.lang.System', 'getenv', 'PATH') is not null",
    "an environment in an error": "raise_error(java_method('java.lang.System', 'getenv', 'PATH')) is null",
    "a property": "reflect('java.lang.System', 'getProperty', 'user.home') is not null",
    "a class": "try_reflect('java.lang.Runtime', 'getRuntime') is not null",
    "JNDI": "java_method('javax.naming.InitialContext', 'doLookup', 'ldap://127.0.0.1:1/x') is null",
    "a function by its whole name": "system.builtin.java_method('java.lang.System', 'getenv', 'PATH') is not null",
    "a function by a made name": "identifier('java_' || 'method')('java.lang.System', 'getenv', 'PATH') is not null",
    "a quoted function": "`java_method`('java.lang.System', 'getenv', 'PATH') is not null",
    "a hidden call": "case when size > 0 then coalesce(reflect('java.lang.System', 'getenv', 'PATH'), '') = '' end",
    "memory by a sequence": "size(sequence(1, 2000000000)) > 0",
    "memory by repetition": "length(repeat(key, 2000000000)) > 0",
    "memory by padding": "length(lpad(key, 2000000000, 'x')) > 0",
    "memory by hex of hex": "length(" + "hex(" * 40 + "key" + ")" * 40 + ") > 0",
    "memory by replacement": "length(replace(replace(body, '', repeat('x', 100000)), 'x', 'xxxxxxxx')) > 0",
    "memory by joined texts": "length(concat(" + ", ".join(["body"] * 1_000) + ")) > 0",
    "memory by an array": "size(array_repeat(body, 100000000)) > 0",
    "a cross join": "exists(select 1 from range(100000000) a cross join range(100000000) b where a.id + b.id < 0)",
    "rows of a bomb": "explode(sequence(1, 100000000)) > 0",
    "stacked rows": "stack(1000000, 1) > 0",
    "a loop of a lambda": "aggregate(sequence(1, 1000000000), 0, (a, b) -> a + 1) > 0",
    "a window": "row_number() over (order by key) = 1",
    "an aggregate": "count(key) > 0",
    "a regular expression without an end": "key rlike '(a+)+$'",
    "the same as a function": "regexp_like(key, '(a+)+$')",
    "another as a function": "regexp_replace(key, '(a+)+$', '') = ''",
    "the version": "version() like '4%'",
    "a registered function": "body_of(record) is null",
    "the current user": "current_user() = 'root'",
    "the current user as a column": "Current_User = 'root' or `user` = 'root'",
    "a collation": "key collate unicode_ci = 'x'",
    "a star": "struct(*) is null",
    "a statement": "true; drop table pending",
    "a parameter": "key = :secret",
    "XML": "xpath_string(key, '/a') is null",
    "a variant": "parse_json(key) is not null",
    "a schema": "from_json(key, 'a int').a = 1",
    "a sketch": "hll_sketch_agg(key) is null",
}
SYNTAX = {"between"}  # not listed as functions


def test_no_attack_by_a_predicate_gets_anywhere(world: World, secret: Path) -> None:
    world.send("a", [HOUR, HOUR + 1])
    for number, (name, where) in enumerate(ATTACKS.items()):
        ask(world, f"attack-{number}", where.format(file=secret))
        world.batch()
        job = world.control.find_job(f"attack-{number}")
        assert job.state == "failed", name
        assert job.reason.startswith(("a predicate may not", "Syntax error")), f"{name}: {job.reason}"
        assert SECRET not in job.reason
        assert "\n" not in job.reason
    assert waiting(world) == [("a 0", HOUR_MS), ("a 1", HOUR_MS + 1)]


def test_a_dry_run_refuses_what_the_job_would(world: World, secret: Path) -> None:
    world.send("a", [HOUR])
    for name, where in ATTACKS.items():
        with pytest.raises(UsageError) as caught:
            query.try_predicate_on(world.spark, where.format(file=secret), world.control)
        assert re.match("a predicate may not|Syntax error", str(caught.value)), name


def test_the_reason_names_the_function_and_what_is_allowed(world: World) -> None:
    for where, said in {
        "hour(due) = 8 and reflect('a', 'b') = ''": "call reflect",
        "key in (select 1)": "hold a subquery",
        "key rlike 'a'": "use rlike",
        "exists(array(1), x -> x > 1)": "call exists",
        "size(map_filter(properties, (k, v) -> true)) = 1": "call map_filter",
        "sum(size) over () = 1": "use WindowExpression",
    }.items():
        with pytest.raises(UsageError) as caught:
            query.try_predicate_on(world.spark, where, world.control)
        assert str(caught.value).startswith(f"a predicate may not {said}: "), caught.value
        assert str(caught.value).endswith("docs/future.md lists")


def test_useful_predicates_pass(world: World) -> None:
    world.send("a", [HOUR, HOUR + 1, HOUR + 2])
    useful = {
        "true": 3,
        "key like 'a-k1%' or key ilike 'A-K2%' and not key like any ('x%', 'y%')": 2,
        "topic = 'orders' and due between timestamp '2020-01-01 00:00:00' and now() + interval 9000 days": 3,
        "properties['UNIQ_KEY'] = 'a-u1' and properties.UNIQ_KEY is not null": 1,
        "substring(key from 3 for 2) = 'k2' and position('k' in key) = 3 and trim(both 'x' from key) = key": 1,
        "cast(body as string) = 'a 1' and try_cast(key as int) is null and size > 2 * 3 - 1": 1,
        "'a-' || 'k1 other' = key and concat('a', '-') = left(key, 2)": 1,
        "case when queue in (0, 1) then extract(year from due) = 1970 else false end": 0,
        "timestampdiff(hour, due, timestampadd(hour, 2, due)) = 2 and crc32(key) % 2 in (0, 1)": 3,
        "due < current_timestamp is true and (tag = 'b') is not true and tag is not distinct from 'a'": 3,
        "element_at(properties, 'UNIQ_KEY') = 'a-u0' and if(level = 0, true, false)": 1,
        "not " * 500 + "(key is null)": 0,
    }
    for where in useful:
        check_predicate(world.spark, where)
    rows = pending(world.spark, world.control).selectExpr(*(f"count_if({where})" for where in useful))
    (found,) = rows.collect()
    assert list(found) == list(useful.values())
    assert query.try_predicate_on(world.spark, "key like 'a-k1%'", world.control).total == 1


def test_every_function_of_the_lists_is_one_of_spark(spark: Any) -> None:
    known = {row.function for row in spark.sql("show system functions").collect()}
    assert {name for names in FUNCTIONS.values() for name in names} <= known | SYNTAX


# -- queries ----------------------------------------------------------------------------------------------------

QUERIES = {
    "a file": "select * from text.`{file}`",
    "a folder": "select * from parquet.`{file}`",
    "a script": "select transform(key) using 'cat {file}' as (a) from pending",
    "an environment": "select java_method('java.lang.System', 'getenv', 'PATH')",
    "a property": "select reflect('java.lang.System', 'getProperty', 'user.home')",
    "JNDI": "select java_method('javax.naming.InitialContext', 'doLookup', 'ldap://127.0.0.1:1/x')",
    "writing": "from pending insert overwrite local directory '{file}.out' using csv select key",
    "writing after with": "with a as (table pending) insert overwrite directory '{file}.out' using csv select * from a",
}


def test_no_attack_by_a_query_gets_anywhere(world: World, secret: Path) -> None:
    world.send("a", [HOUR])
    for name, text in QUERIES.items():
        with pytest.raises(UsageError) as caught:
            query.answer_on(world.spark, text.format(file=secret), world.control, 10)
        assert SECRET not in str(caught.value), name
    assert sorted(path.name for path in secret.parent.iterdir()) == ["secret.txt"]
    for text in ["select count(*) from pending", "with a as (table pending) select count(*) from a"]:
        assert query.answer_on(world.spark, text, world.control, 10).rows == [[1]]


def test_the_asker_may_let_a_query_read_files(world: World, secret: Path) -> None:
    """The query runs in a Spark of the asker's own, with the asker's rights; `postdate sql --files` sets this."""
    world.spark.conf.set("spark.sql.runSQLOnFiles", True)
    try:
        found = query.answer_on(world.spark, f"select * from text.`{secret}`", world.control, 10)
    finally:
        world.spark.conf.set("spark.sql.runSQLOnFiles", False)
    assert found.rows == [[SECRET]]


def test_the_session_cannot_be_made_less_strict(spark: Any) -> None:
    with pytest.raises(Exception, match="CANNOT_MODIFY"):
        spark.sql("set spark.sql.restrictedMode.enabled = false")
    assert spark.conf.get("spark.sql.restrictedMode.enabled") == "true"
    assert spark.conf.get("spark.sql.runSQLOnFiles") == "false"
    assert spark.sparkContext.getConf().get("spark.driver.maxResultSize") == "512m"
