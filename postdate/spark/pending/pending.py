"""What waits, for users of Python: `postdate.pending`.

With a Spark session of the caller's it is a DataFrame on that session. Without one it is an Arrow table, made by a
process of its own (extract.py): Spark in the caller's process would have a say in its environment, its stderr, and
whether it can start another Spark. Nothing of Spark is imported before it is needed.
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

from postdate.client.connection import parse_address
from postdate.client.errors import Unreachable
from postdate.errors import PipelineFailed, UsageError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

BULK = "127.0.0.1:9878"
_FAULTS = {kind.__name__: kind for kind in (UsageError, Unreachable, PipelineFailed)}


class Wish(NamedTuple):
    """What is wanted of the view, for the process that makes it."""

    bulk: str
    where: str
    columns: list[str]  # none = all
    limit: int  # 0 = all
    memory: str
    target: str  # a folder that is not there yet


@overload
def pending(spark: "SparkSession", *, bulk: str = BULK) -> "DataFrame": ...
@overload
def pending(
    *, where: str = "", columns: Sequence[str] = (), limit: int | None = None, bulk: str = BULK, memory: str = "1g"
) -> pa.Table: ...
def pending(
    spark: "SparkSession | None" = None,
    *,
    where: str = "",
    columns: Sequence[str] = (),
    limit: int | None = None,
    bulk: str = BULK,
    memory: str = "1g",
) -> Any:
    """All that waits, wherever it lies, as it is at the moment; `bulk` is the broker's bulk address.

    With a Spark session: a DataFrame on it, which is read when it is used. Without: a pyarrow.Table, by a Spark that is
    started for it and has ended on return. `where`, a predicate of Spark SQL, chooses its rows and `columns` its
    columns, so that nothing else is read; `limit` leaves so many, those that are due first; `memory` is Spark's heap.

    Raises UsageError where Spark does not understand a name or a predicate, Unreachable where no broker answers,
    PipelineFailed where Spark fails, or there is no Java for it.
    """
    parse_address(bulk)
    if spark is not None:
        if where or columns or limit is not None:
            raise UsageError("where, columns and limit are for a call without a session: a DataFrame has its own")
        return _on(spark, bulk)
    if isinstance(columns, str):
        raise UsageError(f"columns is a list of names, got the text {columns!r}")
    if limit is not None and limit < 1:
        raise UsageError(f"limit is at least 1, got {limit}")
    with tempfile.TemporaryDirectory(prefix="postdate-pending-", ignore_cleanup_errors=True) as folder:
        wish = Wish(bulk, where, list(columns), limit or 0, memory, str(Path(folder) / "rows"))
        _extract(wish, folder)
        return pq.read_table(wish.target).replace_schema_metadata()  # of Spark's own


# -- on a session of the caller's -------------------------------------------------------------------------------


def _on(spark: Any, bulk: str) -> Any:
    from pyspark.sql import SparkSession

    from postdate.spark.pending import query, view

    if not isinstance(spark, SparkSession):
        raise UsageError(f"pending takes a Spark session, or nothing and names; got {spark!r}")
    with query.told(bulk), _own_python(spark.sparkContext):
        return view.pending(spark, bulk)


@contextmanager
def _own_python(context: Any) -> Iterator[None]:
    """On this machine our functions run on this interpreter, which has our modules. Unless PYSPARK_PYTHON names one,
    Spark would take the first python3 of the PATH, whatever environment that belongs to.
    """
    before = context.pythonExec
    if context.master.startswith("local") and "PYSPARK_PYTHON" not in os.environ:
        context.pythonExec = sys.executable
    try:
        yield
    finally:
        context.pythonExec = before


# -- without one ------------------------------------------------------------------------------------------------


def _extract(wish: Wish, folder: str) -> None:
    """Has a process write the rows. It finds the modules that we find, and leaves its scratch files in the folder."""
    # Archives are left out: a Spark of the caller's may have put one there, with a part of our modules.
    places = [place for place in (place or os.getcwd() for place in sys.path) if os.path.isdir(place)]
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(places), "TMPDIR": folder}
    command = [sys.executable, "-P", "-m", "postdate.spark.pending.extract", json.dumps(wish)]
    done = subprocess.run(
        command, env=environ, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", check=False
    )
    if done.returncode:
        raise _fault(done.stderr.strip().rpartition("\n")[2], done.returncode)


def _fault(line: str, code: int) -> Exception:
    """What the process said last is the name of an error and its sentence."""
    name, _, sentence = line.partition(": ")
    if name in _FAULTS:
        return _FAULTS[name](sentence)
    return PipelineFailed(f"the process that was to read what waits ended with code {code}: {line}")
