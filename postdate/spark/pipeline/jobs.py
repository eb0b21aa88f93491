"""Jobs, as a batch carries them out: one after the other, each at its command's place in the far queue.

    import              the broker notes it, then its files, which lie beside the table, become files of the table
    cancel, postpone    select by a predicate, have the broker decide, follow the decision

The decision is in the broker's log. Where a batch dies, the next one begins with what the log and the table say: it
selects again where nothing is decided, and follows the decision where there is one.
"""

import re
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

from postdate.contract import ENDED, IMPORT, RUNNING, WAITING, JobOrder, Selection, State, TableFile
from postdate.errors import CorruptTable, Refused
from postdate.faultpoint import reach
from postdate.spark.executor import selecting
from postdate.spark.executor.broker_client import BrokerClient
from postdate.spark.executor.tasks import read_results, written_files
from postdate.spark.pending import view
from postdate.table import merging
from postdate.table.delta import Table
from postdate.table.files import WrittenFile, describe_file, find_beside
from postdate.table.format import name_taken_in

# Errors of a predicate: another try would end in the same way.
_OF_PREDICATE = (
    ParseException, AnalysisException, ArithmeticException, ArrayIndexOutOfBoundsException, DateTimeException,
    IllegalArgumentException, NumberFormatException, SparkRuntimeException,
)  # fmt: skip
_TRIES = 3
_BESIDE = ("_import-", "_job-")  # begin the names of files that are not in the table yet
_AROUND_SENTENCE = re.compile(r"^\[[A-Z0-9_.]+\] |\s*SQLSTATE: \w+.*$")  # the name of the error, and its code

Run = Callable[[Callable[[Any], Any], list[dict[str, Any]]], list[dict[str, Any]]]


def spark_sentence(error: object) -> str:
    """What Spark says of a query, without the name of the error and its page of Java."""
    text = str(getattr(error, "desc", None) or error).strip()
    return _AROUND_SENTENCE.sub("", text.partition("\n")[0])[:500]


class Jobs:
    """Carries out the jobs of one broker. `run` runs tasks on the executors."""

    def __init__(self, spark: SparkSession, broker: BrokerClient, table: Table, run: Run) -> None:
        self._spark = spark
        self._broker = broker
        self._table = table
        self._run = run

    def carry_out(self, number: int, far: int, state: State, epoch: int) -> None:
        """Carries out a job whose command is at a far row; the table has everything before that row. Afterwards it has
        the command, too, or the job has failed.
        """
        job = self._broker.order(number)
        if job.state in ENDED:
            return
        if job.op == IMPORT:
            self._adopt(job, far, epoch)
            return
        if job.state == WAITING:
            selection = self._select(job, state, epoch)
            if selection is None:
                return
            reach("job.decide")
            job = self._broker.decide(selection)
            reach("job.decided")
        self._follow(job, far, state)

    def remove_strangers(self) -> None:
        """Removes files beside the table that belong to jobs that are over: imports that died, and tasks that went on
        writing after their import was given up. Lists the files first: later ones may belong to jobs that just began.
        """
        place = self._table.folder
        names = [name for name in place.sizes() if name.startswith(_BESIDE)]
        if not names:
            return
        open_jobs = [job for job in self._broker.jobs() if not job.is_over]
        stems = (*(f"_import-{job.id}-" for job in open_jobs), *(f"_job-{job.number:08d}-" for job in open_jobs))
        for name in names:
            if not name.startswith(stems):
                place.remove(name)

    # -- imports ------------------------------------------------------------------------------------------------

    def _adopt(self, job: JobOrder, far: int, epoch: int) -> None:
        """Takes an import into the table. After that it cannot be withdrawn: the log must say so before."""
        try:
            files = [self._move_in(file, far) for file in job.files]
        except (OSError, ValueError) as error:
            if job.state != WAITING:
                raise CorruptTable(f"what job {job.id} imports cannot be read: {error}") from error
            self._broker.fail_job(job.id, f"a file of the import cannot be read: {error}")
            return
        if job.state == WAITING:
            try:
                self._broker.decide(Selection(epoch, job.number, ()))
            except Refused:
                if self._broker.order(job.number).state != RUNNING:  # bulk has brought rows of it meanwhile
                    raise
        reach("job.adopted")
        self._table.take(files, far + 1)

    def _move_in(self, file: TableFile, far: int) -> WrittenFile:
        """Gives a file beside the table the name of a batch's own file. Describes it by what it holds, not by what its
        maker said of it.
        """
        target = name_taken_in(file.path, far)
        self._table.folder.rename(find_beside(self._table.folder, file.path, far), target)
        return describe_file(self._table.folder, target)

    # -- selecting ----------------------------------------------------------------------------------------------

    def _select(self, job: JobOrder, state: State, epoch: int) -> Selection | None:
        """Uploads the rows that a job's predicate selects. Returns None where the job has failed."""
        tried = self._broker.find_job(job.id).done
        self._broker.note_progress(job.id, "selecting", tried + 1, _TRIES)
        try:
            found = self._upload(job, state)
        except _OF_PREDICATE as error:
            self._broker.fail_job(job.id, spark_sentence(error))
            return None
        except PySparkException as error:
            if tried + 1 < _TRIES:
                raise
            self._broker.fail_job(job.id, f"given up after {_TRIES} tries: {spark_sentence(error)}")
            return None
        limit = state.now_ms + state.delay_ms_max
        if any(part["due_high"] + job.by_ms > limit for part in found) and job.by_ms:
            self._broker.fail_job(job.id, "a message would be due later than delay_ms_max from now")
            return None
        parts = tuple((part["name"], part["own"]) for part in found)
        files = tuple(TableFile(*file) for part in found for file in part["files"])
        return Selection(epoch, job.number, parts, files)

    def _upload(self, job: JobOrder, state: State) -> list[dict[str, Any]]:
        """Runs the tasks that select and upload; returns what each has uploaded."""
        spark, bulk = self._spark, self._broker.bulk_of(state)
        spark.conf.set("spark.sql.session.timeZone", "UTC")
        files = list(self._table.files.values())
        with view.selectable(spark, bulk, state, self._table.folder.uri, files, job.arrival) as rows:
            # Neither the predicate nor what Spark says of it may speak of hidden columns.
            view.matching(rows.select(*view.SHOWN), job.where)
            selected = rows.where(job.where).select(*selecting.columns(job.by_ms))
            task = {
                "bulk": bulk, "table": self._table.folder.uri, "number": job.number, "by_ms": job.by_ms,
                "edge": merging.edge_ms(state.now_ms),
            }  # fmt: skip
            answers = selected.mapInArrow(selecting.select(task), "result string").collect()
        return read_results(row.result for row in answers)

    # -- following ----------------------------------------------------------------------------------------------

    def _follow(self, job: JobOrder, far: int, state: State) -> None:
        """Changes the table as decided: adds rows that take others away, and rows that come again."""
        common = {"by_ms": job.by_ms, "far": far, "edge": merging.edge_ms(state.now_ms)}
        work = [common | {"name": part.name, "late": list(part.late), "own": part.own} for part in job.parts]
        self._broker.note_progress(job.id, "writing", 0, job.changed)
        files = written_files(self._run(selecting.drop, work))
        try:
            files += [self._move_in(file, far) for file in job.files]
        except (OSError, ValueError) as error:
            raise CorruptTable(f"what job {job.id} has postponed cannot be read: {error}") from error
        reach("job.written")
        self._table.take(files, far + 1)
        reach("job.followed")
