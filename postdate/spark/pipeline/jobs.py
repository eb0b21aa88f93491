"""Jobs, as batches meet them: each at its row in the far queue. beside.py selects for them before that.

    import              the broker notes it, then its files, which lie beside the table, become files of the table
    cancel, postpone    the table follows what was decided

The broker's log decides. Where a batch dies, the next one begins with what the log and the table say. A job fails
alone: whatever goes wrong is noted as a try of that job, and the batch goes on.
"""

import logging
import re
from collections.abc import Callable
from typing import Any

from py4j.protocol import Py4JError
from pyspark.errors import PySparkException

from postdate.contract import ENDED, IMPORT, RUNNING, WAITING, JobOrder, Selection, State, TableFile
from postdate.errors import Refused
from postdate.faultpoint import reach
from postdate.spark.executor import selecting
from postdate.spark.executor.broker_client import AWAY, BrokerClient
from postdate.spark.executor.tasks import written_files
from postdate.spark.session.session import has_java_ended
from postdate.table import merging
from postdate.table.delta import Table
from postdate.table.files import WrittenFile, describe_file, find_beside, remove_file, rename_file
from postdate.table.format import BESIDE, name_taken_in

logger = logging.getLogger("postdate.pipeline")

JAVA_ENDED = "Spark's Java process ended during it"
_AROUND_SENTENCE = re.compile(r"^\[[A-Z0-9_.]+\] |\s*SQLSTATE: \w+.*$")  # the name of the error, and its code

Run = Callable[[Callable[[Any], Any], list[dict[str, Any]]], list[dict[str, Any]]]


def spark_sentence(error: object) -> str:
    """What Spark says of a query, without the name of the error and its page of Java."""
    text = str(getattr(error, "desc", None) or error).strip() or repr(error)
    return _AROUND_SENTENCE.sub("", text.partition("\n")[0])[:500]


def why_failed(spark: Any, error: BaseException) -> str:
    """Why a try of a job has failed, in a sentence: JAVA_ENDED wherever Java has, whichever call has noticed it. Until
    its process is gone Java answers with errors of its own; after that it refuses connections.
    """
    is_of_java = isinstance(error, ConnectionError | Py4JError | PySparkException)
    return JAVA_ENDED if is_of_java and has_java_ended(spark) else spark_sentence(error)


class Jobs:
    """Has the table of one broker take in imports and follow decisions. `run` runs tasks on the executors."""

    def __init__(self, spark: Any, broker: BrokerClient, table: Table, run: Run) -> None:
        self._spark = spark
        self._broker = broker
        self._table = table
        self._run = run

    def carry_out(self, number: int, far: int, state: State, epoch: int) -> bool:
        """Carries out the job of a far row; the table has everything before that row. Returns whether the batch may go
        on after it; if not, a later batch tries again.
        """
        job = self._broker.order(number)
        if job.state in ENDED or job.aside or (job.state == WAITING and job.op != IMPORT):
            return True  # it has a row of an earlier try, or of an earlier version
        job = self._broker.try_job(epoch, number)
        if job.refusal:
            self._move_out(job, far)
            return True
        try:
            files = self._follow(job, far, state)
            is_decided = job.state != WAITING or self._note_import(job, epoch)
        except (*AWAY, Refused):
            raise
        except Exception as error:  # whatever it is, it is this job's alone
            said = why_failed(self._spark, error)
            logger.warning("the table cannot follow job %s: %s", job.id, said)
            self._move_out(job, far)
            job = self._broker.stumble(epoch, number, said)
            return bool(job.aside) or job.state in ENDED
        if is_decided:
            reach("job.written")
            self._table.take(files, far + 1)
            reach("job.followed")
        return True

    def _note_import(self, job: JobOrder, epoch: int) -> bool:
        """Has the log say that an import can be withdrawn no more; returns whether that was in time."""
        try:
            self._broker.decide(Selection(epoch, job.number, ()))
        except Refused:
            state = self._broker.order(job.number).state
            if state == WAITING:
                raise
            return state == RUNNING  # bulk has brought rows of it meanwhile; else it was withdrawn
        reach("job.adopted")
        return True

    def place_again(self, state: State, epoch: int) -> None:
        """Has the table follow jobs that were set aside: what stood in the way may be gone."""
        for number, far in state.commands:
            job = self._broker.order(number)
            if job.aside:
                self._move_out(job, far)
                self._broker.try_again(epoch, number)

    def remove_strangers(self) -> None:
        """Removes files beside the table that belong to jobs that are over: imports that died, and tasks that went on
        writing after their import was given up. Lists the files first: later ones may belong to jobs that just began.
        """
        place = self._table.folder
        names = [name for name in place.sizes() if name.startswith(BESIDE)]
        if not names:
            return
        open_jobs = [job for job in self._broker.jobs() if not job.is_over]
        stems = (*(f"_import-{job.id}-" for job in open_jobs), *(f"_job-{job.number:08d}-" for job in open_jobs))
        for name in names:
            if not name.startswith(stems):
                remove_file(place, name)

    # -- files --------------------------------------------------------------------------------------------------

    def _follow(self, job: JobOrder, far: int, state: State) -> list[WrittenFile]:
        """Writes what the table gets: rows that take others away, and rows that come, or come again."""
        self._broker.note_progress(job.id, "writing", 0, job.changed)
        common = {"by_ms": job.by_ms, "far": far, "edge": merging.edge_ms(state.now_ms)}
        work = [common | {"name": part.name, "late": list(part.late), "own": part.own} for part in job.parts]
        files = written_files(self._run(selecting.drop, work))
        return files + [self._move_in(file, far) for file in job.files]

    def _move_in(self, file: TableFile, far: int) -> WrittenFile:
        """Gives a file beside the table the name of a batch's own file. Describes it by what it holds, not by what its
        maker said of it.
        """
        target = name_taken_in(file.path, far)
        rename_file(self._table.folder, find_beside(self._table.folder, file.path, far), target)
        try:
            return describe_file(self._table.folder, target)
        except (OSError, ValueError) as error:
            raise ValueError(f"a file of the job cannot be read: {error}") from error

    def _move_out(self, job: JobOrder, far: int) -> None:
        """Gives the files of a job their names back: what is not in the table and not beside it is removed one day."""
        for file in job.files:
            try:
                rename_file(self._table.folder, find_beside(self._table.folder, file.path, far), file.path)
            except OSError as error:
                logger.warning("a file of job %s is not beside the table: %s", job.id, error)
