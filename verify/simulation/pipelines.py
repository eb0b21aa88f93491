"""Two pipelines over one table, which do not know each other, and what must hold for them.

- The broker accepts a stage exactly if its pipeline was the last to register, and no other stage came first.
- The broker rescues nothing while a pipeline is in time.
- A pipeline that has taken everything leaves no job open.
- The broker refuses another broker's table, and one that knows more than the log, and changes nothing then. It accepts
  its own after any crash.
"""

from postdate.broker.staging import VerifiedStage
from postdate.contract import Stage
from postdate.errors import DiskFull, ForeignTable, Refused
from verify.simulation.model import Broken
from verify.simulation.pipeline import SimulatedPipeline
from verify.simulation.site import Site, Watch
from verify.simulation.timekeeper import Timekeeper

_ALL = 1_000_000  # more rows and commands than a history has
_SELECTION = 4  # steps of a whole selection
_AGES_MS = 100 * 365 * 86_400_000


class Pipelines:
    """Both pipelines. `which` is always the number of one."""

    def __init__(self, site: Site, watch: Watch, time: Timekeeper) -> None:
        self._site = site
        self._watch = watch
        self._time = time
        self._pipelines = [SimulatedPipeline(site.disk, site.table, site.digest) for _ in range(2)]
        self._last: Stage | None = None
        self._unfinished: tuple[Stage, VerifiedStage] | None = None  # chunks are read, record is not written

    def _pipeline(self, which: int) -> SimulatedPipeline:
        return self._pipelines[which % len(self._pipelines)]

    def _is_newest(self, pipeline: SimulatedPipeline) -> bool:
        return pipeline.epoch == self._site.broker.fold.far.epoch

    # -- life --------------------------------------------------------------------------------------------------

    def register(self, which: int = 0) -> None:
        """A pipeline starts, or starts again; the other one, if it runs, does not know."""
        self._watch.flush()  # an answer is checked by what was true when it was given
        with self._site.digest.suppress(DiskFull):
            self._pipeline(which).register(self._site.broker, self._site.now_ms())

    def register_foreign(self, how: int) -> None:
        """A pipeline starts with another broker's table, or with one that knows more than the log. It is refused."""
        self._watch.flush()
        broker, marks = self._site.broker, self._site.table.marks
        position, mark = broker.view.log_mark or (broker.log.end, 0)
        foreign = (
            marks._replace(identity="e" * 32),
            marks._replace(position=broker.log.end, mark=mark),
            marks._replace(position=position, mark=mark ^ 1),
            marks._replace(far=broker.fold.far.length + 1),
        )[how % 4]
        before = broker.view.far
        try:
            broker.register_pipeline(self._site.now_ms(), table="foreign", marks=foreign)
        except ForeignTable as error:
            self._site.digest.note_error(error)
        else:
            raise Broken(f"a table with the marks {foreign} was accepted by the broker {broker.identity}")
        if broker.view.far != before:
            raise Broken(f"a refused table has changed {before} to {broker.view.far}")

    def die(self, which: int) -> None:
        """A pipeline dies. The broker does not know; nothing is promoted any more."""
        self._pipeline(which).die()

    def doubt(self) -> None:
        """The broker has crashed."""
        for pipeline in self._pipelines:
            pipeline.doubt()

    def serve(self, minutes: int, which: int = 0) -> None:
        """Runs a pipeline in normal life: at each new minute (here the lead) it takes everything and promotes up to the
        end of the next minute. After its first batch the broker must not rescue anything.
        """
        minute_ms = self._site.settings.lead_ms
        rescued: int | None = None
        for _ in range(minutes):
            self._time.let_pass(minute_ms - self._site.now_ms() % minute_ms)
            if rescued is not None and self._site.broker.rescuer.rescued_count > rescued:
                count = self._site.broker.rescuer.rescued_count - rescued
                raise Broken(f"{count} messages were rescued from a pipeline in time")
            self.work(_ALL, which)
            self.stage(2 * minute_ms, which)
            self.select(_SELECTION, which)
            rescued = self._site.broker.rescuer.rescued_count if self._is_in_time() else None
            self._site.digest.note("serve", rescued)

    def _is_in_time(self) -> bool:
        """Whether the pipeline has done the work of this minute, and the broker can fire (its disk is not full)."""
        broker, far = self._site.broker, self._site.broker.fold.far
        ahead_ms = far.horizon_at_ms - self._site.now_ms()
        return far.taken == far.length and ahead_ms >= 2 * self._site.settings.lead_ms and broker.fire_error is None

    def hand_over(self) -> None:
        """At the end of a history, stages everything that waits in the far queue and the table."""
        jobs = self._site.broker.fold.jobs
        if self._site.broker.fold.far.epoch or jobs.open():
            self._pipeline(0).failing = 0
            self.register()
            self.read(_ALL)
            if any(job.aside for job in jobs.open()):  # after too many kills
                self.register()
                self.read(_ALL)
            self.stage(_AGES_MS)
            while jobs.next_to_select() is not None:
                self.select(_SELECTION)
                self.read(_ALL)
                self.stage(_AGES_MS)
        if jobs.open():
            raise Broken(f"a job is {jobs.open()[0]}, and a pipeline has taken everything")

    # -- the first half of a batch --------------------------------------------------------------------------------

    def read(self, count: int, which: int = 0) -> None:
        """Takes far rows into the table, which follows the jobs among them."""
        self._watch.flush()
        if self._pipeline(which).epoch:
            with self._site.digest.suppress(DiskFull, OSError):  # no room for a selection or a decision
                self._pipeline(which).read(self._site.broker, count, self._site.now_ms())
        self._watch.look()

    def work(self, count: int, which: int = 0) -> None:
        """Reads as above, but registers first if it has to."""
        pipeline = self._pipeline(which)
        if not self._is_newest(pipeline) or not pipeline.epoch:
            self.register(which)
        self.read(count, which)

    # -- beside the batches ---------------------------------------------------------------------------------------

    def select(self, steps: int, which: int = 0) -> None:
        """Does some steps of the selection for the next job; it hangs where no more come."""
        self._watch.flush()
        if self._pipeline(which).epoch:
            with self._site.digest.suppress(DiskFull, OSError):  # no room for a selection or a decision
                self._pipeline(which).select(self._site.broker, steps, self._site.now_ms())
        self._watch.look()

    def fail_tries(self, count: int, which: int = 0) -> None:
        """The next tries of jobs fail."""
        self._pipeline(which).failing = count

    def leave(self, which: int = 0) -> None:
        """A pipeline is stopped in order."""
        self._watch.flush()
        with self._site.digest.suppress(DiskFull):
            self._pipeline(which).leave(self._site.broker, self._site.now_ms())

    # -- the second half ------------------------------------------------------------------------------------------

    def stage(self, ahead_ms: int, which: int = 0) -> None:
        """Promotes everything in the table that is due up to now + ahead."""
        pipeline = self._pipeline(which)
        if not pipeline.epoch:
            return
        self._watch.flush()
        with self._site.digest.suppress(DiskFull, OSError):  # no room for the log or for the chunk
            is_newest = self._is_newest(pipeline)
            is_staged = self._try_stage(self._plan(pipeline, ahead_ms))
            if is_staged != is_newest:
                raise Broken(f"the stage of epoch {pipeline.epoch} was {'accepted' if is_staged else 'refused'}")
            if is_staged:
                pipeline.forget(self._site.broker)
            else:
                pipeline.die()  # the refusal says that another one has registered
        self._watch.hear()

    def _plan(self, pipeline: SimulatedPipeline, ahead_ms: int) -> Stage:
        return pipeline.plan_stage(self._site.broker, self._site.now_ms() + ahead_ms)

    def _try_stage(self, stage: Stage) -> bool:
        """Calls the broker; returns whether it accepted the stage."""
        self._last = stage
        staging, now_ms = self._site.broker.staging, self._site.now_ms()
        try:
            staging.check(stage)
            staging.doubt(stage, now_ms)
            staging.believe(stage, staging.verify(stage))
            self._site.broker.stage(stage, now_ms)
        except Refused as error:
            self._site.digest.note_error(error)
            return False
        finally:
            self._note_chunks(stage)
        self._site.digest.note("stage", *stage)
        return True

    def _note_chunks(self, stage: Stage) -> None:
        """Called also for a stage during which the process dies: it may be durable already."""
        self._site.staged_chunks.update(stage.chunks)

    def stage_again(self) -> None:
        """Repeats the last stage, as a pipeline does that got no answer."""
        last, far = self._last, self._site.broker.fold.far
        if last is None:
            return
        self._watch.flush()
        if self._is_next(last) or not self._has_chunks(last):
            return
        try:
            self._site.broker.stage(last, self._site.now_ms())
        except (Refused, DiskFull) as error:
            self._site.digest.note_error(error)
            return
        raise Broken(
            f"the stage {last} was accepted though the broker is at far {far.taken}, horizon {far.horizon_at_ms}"
        )

    def _is_next(self, stage: Stage) -> bool:
        """Whether a stage has the newest epoch and begins where the broker is."""
        far = self._site.broker.fold.far
        return (stage.epoch, stage.far[0], stage.horizon[0]) == (far.epoch, far.taken, far.horizon_at_ms)

    def _has_chunks(self, stage: Stage) -> bool:
        """Whether its chunks exist: a pipeline that registers removes unused uploads of older ones."""
        return all(self._site.disk.size(f"chunks/{name}") >= 0 for name in stage.chunks)

    def upload(self, ahead_ms: int, which: int = 0) -> None:
        """A pipeline uploads the chunks of a stage and dies."""
        pipeline = self._pipeline(which)
        if pipeline.epoch:
            with self._site.digest.suppress(OSError):
                self._plan(pipeline, ahead_ms)
            pipeline.die()

    # -- a stage in two parts, as the server has it ---------------------------------------------------------------

    def begin_stage(self, ahead_ms: int, which: int = 0) -> None:
        """Reads the chunks of a stage, while everything else goes on."""
        pipeline, staging = self._pipeline(which), self._site.broker.staging
        if not pipeline.epoch or not self._is_newest(pipeline):
            return
        with self._site.digest.suppress(OSError):
            stage = self._plan(pipeline, ahead_ms)
            staging.check(stage)
            staging.doubt(stage, self._site.now_ms())
            self._unfinished = stage, staging.verify(stage)

    def end_stage(self) -> None:
        """Writes the record of that stage; applying it compares it with where the broker is by then."""
        if self._unfinished is None:
            return
        (stage, chunks), self._unfinished = self._unfinished, None
        if not self._has_chunks(stage):
            return  # another pipeline has registered meanwhile
        self._note_chunks(stage)
        is_next = self._is_next(stage)
        try:
            self._site.broker.staging.believe(stage, chunks)
            ticket = self._site.broker.staging.write(stage, chunks, self._site.now_ms())
        except DiskFull as error:
            self._site.digest.note_error(error)
            return
        except Refused as error:
            self._site.digest.note_error(error)
            if is_next:
                raise Broken(f"a stage that comes next is refused: {error}") from None
            return
        self._watch.flush()
        self._site.digest.note("staged", ticket.answer.accepted)
        if not is_next and ticket.answer.accepted:
            raise Broken(f"{stage} was accepted though the broker had moved on")
