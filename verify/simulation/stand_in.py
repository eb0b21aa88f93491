"""Bulk, where no pipeline promotes: it stages what the table has, and rows of jobs that the table has not taken in.

- The broker accepts such a stage exactly if it begins where the broker is: epoch, taken and horizon, and how far the
  rows of a job were brought before.
- While bulk looks often enough, no message is late, wherever it lies: the absence of a pipeline excuses nothing.
"""

from postdate.broker.staging import VerifiedStage
from postdate.contract import Stage
from postdate.errors import DiskFull, Refused
from postdate.faultpoint import reach
from postdate.state.jobs import IMPORT, POSTPONE, RUNNING, WAITING, Job
from postdate.storage.batch import CANCEL
from verify.simulation.model import Broken
from verify.simulation.pipeline import TableRow, living, write_chunks
from verify.simulation.site import Site, Watch
from verify.simulation.timekeeper import Timekeeper


class StandIn:
    """Promotes under the epoch in force, and never registers."""

    def __init__(self, site: Site, watch: Watch, time: Timekeeper) -> None:
        self._site = site
        self._watch = watch
        self._time = time
        self._chunk_count = 0
        self._unfinished: tuple[Stage, VerifiedStage] | None = None  # chunks are read, record is not written

    def serve(self, minutes: int) -> None:
        """The pipeline is away, and bulk looks twice in each minute (here the lead): nothing may be late."""
        for _ in range(2 * minutes):
            is_done = self._promote(2 * self._site.settings.lead_ms)
            self._time.let_pass(self._site.settings.lead_ms // 2, excuses=not is_done)

    def promote(self, ahead_ms: int) -> None:
        """Looks once: promotes up to now + ahead."""
        self._promote(ahead_ms)

    def _promote(self, ahead_ms: int) -> bool:
        """Returns whether it could."""
        self._watch.flush()
        try:
            if self._site.broker.fold.far.epoch:
                self._stage(self._plan_table(ahead_ms))
                for job in self._open_jobs():
                    self._stage(self._plan_job(job))
        except (DiskFull, OSError) as error:  # no room for the log or for a chunk
            self._site.digest.note_error(error)
            return False
        finally:
            self._watch.hear()
        return bool(self._site.broker.fold.far.epoch)

    def _stage(self, stage: Stage) -> None:
        self._site.staged_chunks.update(stage.chunks)  # before the call, which may kill the process
        try:
            reach("bulk.stage")
            staging, now_ms = self._site.broker.staging, self._site.now_ms()
            staging.doubt(stage, now_ms)
            staging.believe(stage, staging.verify(stage))
            self._site.broker.stage(stage, now_ms)
            reach("bulk.staged")
        except Refused as error:
            raise Broken(f"a stage of bulk that comes next is refused: {error}") from None
        self._site.digest.note("bulk", *stage)
        self._watch.flush()

    # -- planning -----------------------------------------------------------------------------------------------

    def _plan_table(self, ahead_ms: int) -> Stage:
        """What the broker has had taken, and is due up to a new horizon."""
        far = self._site.broker.fold.far
        horizon = (far.horizon_at_ms, max(self._site.now_ms() + ahead_ms, far.horizon_at_ms))
        rows = [row for row in self._site.table.waiting(self._site.broker) if row.due <= horizon[1]]
        chunks = self._write(living(rows))
        return Stage(far.epoch, (far.taken, far.taken), horizon, chunks, far.rows_in, len(rows))

    def _open_jobs(self) -> list[Job]:
        """Jobs whose files the log has accepted and no stage has taken."""
        return [
            job
            for job in self._site.broker.fold.jobs.open()
            if (job.op == IMPORT and job.state in (WAITING, RUNNING)) or (job.op == POSTPONE and job.state == RUNNING)
        ]

    def _plan_job(self, job: Job) -> Stage:
        """What lies in a job's files, is due up to the horizon and was not brought before."""
        far, table = self._site.broker.fold.far, self._site.table
        late = {part.own + index for part in job.parts for index in part.late}
        rows = [
            row
            for file in job.files
            for row in table.aside[file[0]]
            if job.brought_until_ms < row.due <= far.horizon_at_ms and row.arrival not in late
        ]
        cancels = [row for row in table.rows if row.row["kind"] == CANCEL and row.number < far.taken]
        brought = ((job.number, job.brought_until_ms, far.horizon_at_ms),)
        places = (far.taken, far.taken), (far.horizon_at_ms, far.horizon_at_ms)
        return Stage(far.epoch, *places, self._write(living(rows + cancels)), far.rows_in, 0, brought)

    def _write(self, rows: list[TableRow]) -> tuple[str, ...]:
        self._chunk_count += 1
        name = f"{self._site.broker.fold.far.epoch:06d}-bulk-{self._chunk_count:08d}"
        return tuple(write_chunks(self._site.disk, name, rows))

    # -- in two parts, while others go on -----------------------------------------------------------------------

    def begin(self, ahead_ms: int, which: int) -> None:
        """Reads the chunks of a stage of the table, or of one of the jobs."""
        self._watch.flush()
        jobs, staging = self._open_jobs(), self._site.broker.staging
        if not self._site.broker.fold.far.epoch:
            return
        with self._site.digest.suppress(OSError):
            stage = self._plan_job(jobs[which % len(jobs)]) if jobs and which else self._plan_table(ahead_ms)
            staging.check(stage)
            staging.doubt(stage, self._site.now_ms())
            self._unfinished = stage, staging.verify(stage)

    def end(self) -> None:
        """Writes the record of that stage; a pipeline, or bulk, may have been there first."""
        if self._unfinished is None:
            return
        (stage, chunks), self._unfinished = self._unfinished, None
        self._watch.flush()
        if not all(self._site.disk.size(f"chunks/{name}") >= 0 for name in stage.chunks):
            return  # a pipeline has registered meanwhile and removed them
        self._site.staged_chunks.update(stage.chunks)
        is_next = self._is_next(stage)
        try:
            self._site.broker.staging.believe(stage, chunks)
            ticket = self._site.broker.staging.write(stage, chunks, self._site.now_ms())
            self._watch.flush()
            is_accepted = ticket.answer.accepted
        except DiskFull as error:
            self._site.digest.note_error(error)
            return
        except Refused as error:
            self._site.digest.note_error(error)
            is_accepted = False
        self._site.digest.note("bulk staged", is_accepted)
        if is_accepted != is_next:
            raise Broken(f"{stage} of bulk was {'accepted' if is_accepted else 'refused'}")

    def _is_next(self, stage: Stage) -> bool:
        far, open_jobs = self._site.broker.fold.far, {job.number: job for job in self._open_jobs()}
        place = (stage.epoch, stage.far[0], stage.horizon[0])
        return place == (far.epoch, far.taken, far.horizon_at_ms) and all(
            number in open_jobs and open_jobs[number].brought_until_ms == from_ms
            for number, from_ms, _ in stage.brought
        )
