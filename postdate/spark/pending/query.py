"""One query over the view `pending`, on a Spark of its own."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from py4j.protocol import Py4JJavaError
from pyarrow import flight
from pyspark.errors import AnalysisException, ParseException, PySparkException

from postdate.client.errors import Unreachable
from postdate.errors import PipelineFailed, UsageError
from postdate.spark.pending.view import VIEW, chosen, pending
from postdate.spark.pipeline.driver import begun, ended, first_line
from postdate.spark.pipeline.jobs import shortened
from postdate.spark.session import java
from postdate.spark.session.session import scratch
from postdate.spark.session.stderr import aside

SAMPLE_ROWS = 10


class Found(NamedTuple):
    names: list[str]
    rows: list[list[Any]]
    is_cut: bool  # there are more


def answer(query: str, bulk: str, limit: int, memory: str, environ: Mapping[str, str]) -> Found:
    """On a Spark of its own. Raises what `answered` raises, PipelineFailed."""
    with embedded(memory, environ) as spark:
        return answered(spark, query, bulk, limit)


def answered(spark: Any, query: str, bulk: str, limit: int) -> Found:
    """At most so many rows. Raises UsageError where Spark does not understand it, Unreachable, PipelineFailed."""
    with told(bulk):
        pending(spark, bulk).createOrReplaceTempView(VIEW)
        rows = spark.sql(query).limit(limit + 1).toArrow()
    columns = [column.to_pylist() for column in rows.slice(0, limit).columns]
    return Found(rows.column_names, [list(row) for row in zip(*columns, strict=True)], rows.num_rows > limit)


class Tried(NamedTuple):
    total: int
    sample: list[dict[str, Any]]  # the first ten that would be changed; `due` in epoch ms


def tried(where: str, bulk: str, memory: str, environ: Mapping[str, str]) -> Tried:
    """What a predicate selects, on a Spark of its own. Raises what `answered` raises, PipelineFailed."""
    with embedded(memory, environ) as spark:
        return sampled(spark, where, bulk)


def sampled(spark: Any, where: str, bulk: str) -> Tried:
    """Raises UsageError where Spark does not understand the predicate, Unreachable, PipelineFailed."""
    with told(bulk):
        rows = chosen(pending(spark, bulk), where)
        first = rows.orderBy("due", "arrival").limit(SAMPLE_ROWS)
        shown = first.selectExpr("unix_millis(due) as due", "topic", "tag", "key", "size", "body")
        return Tried(rows.count(), shown.toArrow().to_pylist())


@contextmanager
def embedded(memory: str, environ: Mapping[str, str]) -> Iterator[Any]:
    """A quiet Spark session on all cores, in UTC; it ends with the block. Raises PipelineFailed."""
    found = java.find(environ)
    if isinstance(found, java.Missing):
        raise PipelineFailed(f"{found.sentence}; {java.INSTALL}")
    with scratch() as folder, aside() as said:
        spark = begun("local[*]", memory, found.home, Path(folder), said)
        try:
            spark.conf.set("spark.sql.session.timeZone", "UTC")
            yield spark
        finally:
            ended(spark)


@contextmanager
def told(bulk: str) -> Iterator[None]:
    """What fails inside, in our words. Raises UsageError, Unreachable, PipelineFailed."""
    try:
        yield
    except (ParseException, AnalysisException) as error:
        raise UsageError(shortened(error)) from error
    except flight.FlightError as error:
        raise Unreachable(f"no broker answers at {bulk}: {first_line(error)}") from error
    except PySparkException as error:
        raise PipelineFailed(first_line(error)) from error
    except Py4JJavaError as error:
        raise PipelineFailed(_named(error)) from error


def _named(error: Py4JJavaError) -> str:
    """What an exception of Java says that PySpark has no name for: the sentence of the first of its causes to which
    Spark has given one, which names the file that could not be read; else that of the first.
    """
    said = [shortened(each) for each in _causes(error.java_exception) if each.startswith("[")]
    return said[0] if said else first_line(error.java_exception.toString())


def _causes(exception: Any) -> Iterator[str]:
    while exception is not None:
        yield str(exception.getMessage() or "")
        exception = exception.getCause()
