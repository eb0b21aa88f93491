"""Jobs, as a batch carries them out: one after the other, each at its command's place in the far queue.

    import              its files, which lie beside the table, become files of it, when the broker has noted that
    cancel, postpone    select by a predicate, have the broker decide, follow the decision

What is decided is in the broker's log. A batch that dies anywhere is followed by one that begins with what the log and
the table say: it selects again where nothing is decided, and follows the decision where there is one.
"""

import re
import uuid
from collections.abc import Callable
from typing import Any

from pyspark.errors import (
    AnalysisException,
    ArithmeticException,
    ArrayIndexOutOfBoundsException,
    DateTimeException,
    IllegalArgumentException,
    NumberFormatException,
    ParseException,
    PySparkException,
    SparkRuntimeException,
)
from pyspark.sql import SparkSession

from postdate.errors import CorruptTable
from postdate.faultpoint import reach
from postdate.spark.executor import selecting
from postdate.spark.executor.bulk_client import Gate
from postdate.spark.executor.tasks import results, written
from postdate.spark.pending import view
from postdate.table import merging
from postdate.table.delta import Table
from postdate.table.files import WrittenFile, describe_file
from postdate.table.format import BATCH_TIERS, batch_file_name

# Whoever wrote the predicate is to blame; another try would end in the same way.
_THEIRS = (
    ParseException, AnalysisException, ArithmeticException, ArrayIndexOutOfBoundsException, DateTimeException,
    IllegalArgumentException, NumberFormatException, SparkRuntimeException,
)  # fmt: skip
_TRIES = 3
_OVER = ("failed", "done")
_BESIDE = ("_import-", "_job-")  # begin the names of files that are not in the table yet
_SHORTENED = re.compile(r"^\[[A-Z0-9_.]+\] |\s*SQLSTATE: \w+.*$")  # the name of the error, what follows the sentence

State = dict[str, Any]
Job = dict[str, Any]
Run = Callable[[Callable[[Any], Any], list[dict[str, Any]]], list[dict[str, Any]]]


def shortened(error: object) -> str:
    """What Spark says of a query, without the name of the error and its page of Java."""
    text = str(getattr(error, "desc", None) or error).strip()
    return _SHORTENED.sub("", text.partition("\n")[0])[:500]


class Jobs:
    """Of one pipeline. `run` runs tasks on the executors."""

    def __init__(self, spark: SparkSession, gate: Gate, bulk: str, table: Table, run: Run) -> None:
        self._spark = spark
        self._gate = gate
        self._bulk = bulk
        self._table = table
        self._run = run

    def carry_out(self, number: int, far: int, state: State, epoch: int) -> None:
        """The table has everything before the command. Afterwards it has the command, too, or the job has failed."""
        job = self._gate.command(number)
        if job["state"] in _OVER:
            return
        if job["op"] == "import":
            self._adopt(job, far, epoch)
            return
        if job["state"] == "waiting":
            selected = self._select(job, state)
            if selected is None:
                return
            reach("job.decide")
            job = self._gate.decide(epoch, number, *selected)
            reach("job.decided")
        self._follow(job, far, state)

    def remove_strangers(self) -> None:
        """Removes files beside the table of jobs that are over: of imports that nobody has given up, because they died,
        or that tasks went on with behind that. Files are listed first: what is written later is none of our business.
        """
        place = self._table.folder
        names = [name for name in place.sizes() if name.startswith(_BESIDE)]
        if not names:
            return
        open_jobs = [job for job in self._gate.jobs() if job["state"] not in _OVER]
        kept = tuple(f"_import-{job['id']}-" for job in open_jobs) + tuple(
            f"_job-{job['number']:08d}-" for job in open_jobs
        )
        for name in names:
            if not name.startswith(kept):
                place.remove(name)

    # -- imports ------------------------------------------------------------------------------------------------

    def _adopt(self, job: Job, far: int, epoch: int) -> None:
        """Once the table has it, it cannot be withdrawn: the log must say so before."""
        try:
            files = [self._moved_in(file, far) for file in job["files"]]
        except (OSError, ValueError) as error:
            if job["state"] != "waiting":
                raise CorruptTable(f"what job {job['id']} imports cannot be read: {error}") from error
            self._gate.fail(job["id"], f"a file of the import cannot be read: {error}")
            return
        if job["state"] == "waiting":
            self._gate.decide(epoch, job["number"], [], [])
        reach("job.adopted")
        self._table.take(files, far + 1)

    def _moved_in(self, file: list[Any], far: int) -> WrittenFile:
        """A file beside the table gets the name of a batch's own file. Its own words count, not those of its maker."""
        source = str(file[0])
        target = batch_file_name(_tier_of(source), far, uuid.uuid5(uuid.NAMESPACE_OID, source).hex[:12])
        self._table.folder.rename(source, target)
        return describe_file(self._table.folder, target)

    # -- selecting ----------------------------------------------------------------------------------------------

    def _select(self, job: Job, state: State) -> tuple[list[tuple[str, int]], list[list[Any]]] | None:
        """The parts that were uploaded, and the files of rows that are brought again. None where the job has failed."""
        tried = self._gate.job(job["id"])["done"]
        self._gate.progress(job["id"], "selecting", tried + 1, _TRIES)
        try:
            found = self._selected(job, state)
        except _THEIRS as error:
            self._gate.fail(job["id"], shortened(error))
            return None
        except PySparkException as error:
            if tried + 1 < _TRIES:
                raise
            self._gate.fail(job["id"], f"given up after {_TRIES} tries: {shortened(error)}")
            return None
        limit = state["now_ms"] + state["delay_ms_max"]
        if any(part["due_high"] + job["by_ms"] > limit for part in found) and job["by_ms"]:
            self._gate.fail(job["id"], "a message would be due later than delay_ms_max from now")
            return None
        return [(part["name"], part["own"]) for part in found], [file for part in found for file in part["files"]]

    def _selected(self, job: Job, state: State) -> list[dict[str, Any]]:
        spark, by_ms = self._spark, job["by_ms"]
        spark.conf.set("spark.sql.session.timeZone", "UTC")
        files = list(self._table.files.values())
        with view.selectable(spark, self._bulk, state, self._table.folder.uri, files, job["arrival"]) as rows:
            view.chosen(rows.select(*view.SHOWN), job["where"])  # neither it nor what Spark says may speak of others
            chosen = rows.where(job["where"]).select(*selecting.columns(by_ms))
            task = {
                "bulk": self._bulk, "table": self._table.folder.uri, "number": job["number"], "by_ms": by_ms,
                "edge": merging.edge_ms(state["now_ms"]),
            }  # fmt: skip
            answers = chosen.mapInArrow(selecting.select(task), "result string").collect()
        return results(row.result for row in answers)

    # -- following ----------------------------------------------------------------------------------------------

    def _follow(self, job: Job, far: int, state: State) -> None:
        """The table follows what is decided: rows that take others away, and those that are brought again."""
        common = {"by_ms": job["by_ms"], "far": far, "edge": merging.edge_ms(state["now_ms"])}
        work = [common | {name: part[name] for name in ("name", "late", "own")} for part in job["parts"]]
        self._gate.progress(job["id"], "writing", 0, job["changed"])
        files = written(self._run(selecting.drop, work))
        try:
            files += [self._moved_in(file, far) for file in job["files"]]
        except (OSError, ValueError) as error:
            raise CorruptTable(f"what job {job['id']} has postponed cannot be read: {error}") from error
        reach("job.written")
        self._table.take(files, far + 1)
        reach("job.followed")


def _tier_of(name: str) -> str:
    """As whoever wrote a file beside the table has named it."""
    return next((tier for tier in BATCH_TIERS if f"-{tier}-" in name), BATCH_TIERS[0])
