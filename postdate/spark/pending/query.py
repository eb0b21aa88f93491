"""Queries over the view `pending`, on a Spark of their own."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from py4j.protocol import Py4JJavaError
from pyarrow import flight
from pyspark.errors import AnalysisException, ParseException, PySparkException

from postdate.client.errors import Unreachable
from postdate.errors import PipelineFailed, UsageError
from postdate.spark.executor.broker_client import BrokerClient
from postdate.spark.pending.predicate import check_predicate
from postdate.spark.pending.view import VIEW, matching, pending
from postdate.spark.pipeline.jobs import spark_sentence
from postdate.spark.session import java
from postdate.spark.session.session import Gateway, first_line, scratch_folder
from postdate.spark.session.stderr import divert_stderr

SAMPLE_ROWS = 10
ONLY_QUERIES = "only queries are answered here: select ... from pending ..."
_WRITES = frozenset({"DeleteFromTable", "InsertIntoDir", "InsertIntoStatement", "MergeIntoTable", "UpdateTable"})


class Found(NamedTuple):
    """What a query answers."""

    names: list[str]
    rows: list[list[Any]]
    is_cut: bool  # there are more rows


def answer(
    query: str, broker: BrokerClient, limit: int, memory: str, environ: Mapping[str, str], *, reads_files: bool
) -> Found:
    """Answers a query on a Spark of its own, which may read files where the asker says so: it has the asker's rights.
    Raises what `answer_on` raises, PipelineFailed.
    """
    with embedded_spark(memory, environ) as spark:
        spark.conf.set("spark.sql.runSQLOnFiles", reads_files)
        return answer_on(spark, query, broker, limit)


def answer_on(spark: Any, query: str, broker: BrokerClient, limit: int) -> Found:
    """Answers with `limit` rows at most. Raises UsageError where Spark does not understand the query, Unreachable,
    PipelineFailed.
    """
    with spark_errors():
        _expect_reading(spark, query)
        pending(spark, broker).createOrReplaceTempView(VIEW)
        rows = spark.sql(query).limit(limit + 1).toArrow()
    columns = [column.to_pylist() for column in rows.slice(0, limit).columns]
    return Found(rows.column_names, [list(row) for row in zip(*columns, strict=True)], rows.num_rows > limit)


def _expect_reading(spark: Any, query: str) -> None:
    """Raises UsageError where a query would write, as one that begins with `with` or `from` may."""
    plans = [spark._jsparkSession.sessionState().sqlParser().parsePlan(query)]
    for plan in plans:
        if str(plan.getClass().getSimpleName()) in _WRITES:
            raise UsageError(ONLY_QUERIES)
        children = plan.children()
        plans += [children.apply(number) for number in range(children.size())]


class Sample(NamedTuple):
    """What a job would change."""

    total: int
    sample: list[dict[str, Any]]  # the first ten; `due` in epoch ms


def try_predicate(where: str, broker: BrokerClient, memory: str, environ: Mapping[str, str]) -> Sample:
    """What a predicate selects, on a Spark of its own. Raises what `answer_on` raises, PipelineFailed."""
    with embedded_spark(memory, environ) as spark:
        return try_predicate_on(spark, where, broker)


def try_predicate_on(spark: Any, where: str, broker: BrokerClient) -> Sample:
    """Raises UsageError where Spark does not understand the predicate, Unreachable, PipelineFailed."""
    with spark_errors():
        check_predicate(spark, where)
        rows = matching(pending(spark, broker), where)
        first = rows.orderBy("due", "arrival").limit(SAMPLE_ROWS)
        shown = first.selectExpr("unix_millis(due) as due", "topic", "tag", "key", "size", "body")
        return Sample(rows.count(), shown.toArrow().to_pylist())


@contextmanager
def embedded_spark(memory: str, environ: Mapping[str, str]) -> Iterator[Any]:
    """Starts a quiet Spark session on all cores, in UTC; it ends with the block. Raises PipelineFailed, and
    KeyboardInterrupt where Ctrl-C ended the block, whatever has failed after that.
    """
    found = java.find(environ)
    if isinstance(found, java.Missing):
        raise PipelineFailed(f"{found.sentence}; {java.INSTALL}")
    with (
        _keep_interrupt(), scratch_folder() as folder, divert_stderr() as lines,
        Gateway("local[*]", memory, found.home, Path(folder)) as gateway,
    ):  # fmt: skip
        spark = gateway.connect(lines)
        spark.conf.set("spark.sql.session.timeZone", "UTC")
        yield spark


@contextmanager
def _keep_interrupt() -> Iterator[None]:
    """Raises KeyboardInterrupt in place of an error that happened while one was on its way. Ctrl-C in a call to Java
    costs the connection; PySpark cleans up with a new one, and that may fail.
    """
    try:
        yield
    except Exception as error:
        before = error.__context__
        while before is not None:
            if isinstance(before, KeyboardInterrupt):
                raise KeyboardInterrupt from error
            before = before.__context__
        raise


@contextmanager
def spark_errors() -> Iterator[None]:
    """Raises errors of Spark and Flight as ours: UsageError, Unreachable, PipelineFailed."""
    try:
        yield
    except (ParseException, AnalysisException) as error:
        raise UsageError(spark_sentence(error)) from error
    except flight.FlightError as error:
        raise Unreachable(f"bulk does not answer: {first_line(error)}") from error
    except PySparkException as error:
        raise PipelineFailed(first_line(error)) from error
    except Py4JJavaError as error:
        # PySpark has no name for it. The first cause to which Spark has given one names the file that it cannot read.
        cause = error.java_exception
        while cause is not None and not str(cause.getMessage() or "").startswith("["):
            cause = cause.getCause()
        found = (
            first_line(error.java_exception.toString()) if cause is None else spark_sentence(str(cause.getMessage()))
        )
        raise PipelineFailed(found) from error
