"""What waits, for users of Python: `postdate.pending`.

With a Spark session of the caller it is a DataFrame on that session. Without one it is an Arrow table, made by another
process (extract.py): Spark in the caller's process would change its environment and its stderr, and keep it from
starting another Spark. Nothing of Spark is imported before it is needed.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, overload

import pyarrow as pa
import pyarrow.parquet as pq

from postdate.client.errors import TimedOut, Unreachable
from postdate.errors import PipelineFailed, UsageError
from postdate.spark.executor.broker_client import BrokerClient

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_ERRORS = {kind.__name__: kind for kind in (UsageError, Unreachable, TimedOut, PipelineFailed)}


class Request(NamedTuple):
    """What the process extracts."""

    address: str
    bulk: str
    where: str
    columns: list[str]  # none: all
    limit: int  # 0: all rows
    memory: str
    target: str  # a folder that is not there yet


@overload
def pending(spark: "SparkSession", *, address: str | None = None, bulk: str = "") -> "DataFrame": ...
@overload
def pending(
    *,
    where: str = "",
    columns: Sequence[str] = (),
    limit: int | None = None,
    address: str | None = None,
    bulk: str = "",
    memory: str = "1g",
) -> pa.Table: ...
def pending(
    spark: "SparkSession | None" = None,
    *,
    where: str = "",
    columns: Sequence[str] = (),
    limit: int | None = None,
    address: str | None = None,
    bulk: str = "",
    memory: str = "1g",
) -> Any:
    """All that waits, wherever it lies, as it is at the moment.

    `address` is the broker's (default: POSTDATE_ADDR, else 127.0.0.1:9876); `bulk` is used in place of the bulk address
    that the broker tells.

    With a Spark session: a DataFrame on it, which is read when it is used. Without: a pyarrow.Table, made by a Spark
    that runs for this call. `where`, a predicate of Spark SQL, chooses its rows and `columns` its columns, so that
    nothing else is read; `limit` leaves that many, those that are due first; `memory` is Spark's heap.

    Raises UsageError where Spark does not understand a name or a predicate, Unreachable where no broker answers,
    PipelineFailed where Spark fails, or there is no Java for it.
    """
    broker = BrokerClient(address, bulk)
    if spark is not None:
        if where or columns or limit is not None:
            raise UsageError("where, columns and limit are for a call without a session: a DataFrame has its own")
        return _frame_on(spark, broker)
    if isinstance(columns, str):
        raise UsageError(f"columns is a list of names, got the text {columns!r}")
    if limit is not None and limit < 1:
        raise UsageError(f"limit is at least 1, got {limit}")
    with tempfile.TemporaryDirectory(prefix="postdate-pending-", ignore_cleanup_errors=True) as folder:
        target = str(Path(folder) / "rows")
        request = Request(broker.addresses, bulk, where, list(columns), limit or 0, memory, target)
        _extract(request, folder)
        return pq.read_table(request.target).replace_schema_metadata()  # of Spark's own


# -- on a session of the caller ---------------------------------------------------------------------------------


def _frame_on(spark: Any, broker: BrokerClient) -> Any:
    from pyspark.sql import SparkSession

    from postdate.spark.pending import query, view

    if not isinstance(spark, SparkSession):
        raise UsageError(f"pending takes a Spark session, or nothing and names; got {spark!r}")
    with query.spark_errors(), _own_python(spark.sparkContext):
        return view.pending(spark, broker)


@contextmanager
def _own_python(context: Any) -> Iterator[None]:
    """Runs our functions on this interpreter, which has our modules, where Spark runs on this machine. Unless
    PYSPARK_PYTHON names one, Spark would take the first python3 of the PATH, of whichever environment.
    """
    before = context.pythonExec
    if context.master.startswith("local") and "PYSPARK_PYTHON" not in os.environ:
        context.pythonExec = sys.executable
    try:
        yield
    finally:
        context.pythonExec = before


# -- in a process -----------------------------------------------------------------------------------------------


def _extract(request: Request, folder: str) -> None:
    """Starts a process that writes the rows. It finds our modules, and its scratch files go to the folder."""
    # Without archives: a Spark of the caller may have put one there, with a part of our modules.
    places = [place for place in (place or os.getcwd() for place in sys.path) if os.path.isdir(place)]
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(places), "TMPDIR": folder}
    command = [sys.executable, "-P", "-m", "postdate.spark.pending.extract", json.dumps(request)]
    done = subprocess.run(
        command, env=environ, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", check=False
    )
    if done.returncode:
        raise _error_of(done.stderr.strip().rpartition("\n")[2], done.returncode)


def _error_of(line: str, code: int) -> Exception:
    """The error in the last line that the process wrote: its name and its sentence."""
    name, _, sentence = line.partition(": ")
    if name in _ERRORS:
        return _ERRORS[name](sentence)
    return PipelineFailed(f"the process that reads what waits ended with code {code}: {line}")
