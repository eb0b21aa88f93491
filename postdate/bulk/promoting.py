"""Promotion where no pipeline does it in time: what lies in the table alone comes into the wheel before it is due.

    the horizon is not the rescue lead ahead          the window of the table up to a new horizon
    a job has rows that no batch has taken in yet     those that fall due, from its files beside the table

Bulk works under the epoch in force, never registers, and writes nothing to the table. The broker compares and sets its
stages as it does a pipeline's: of two that race one is refused, and reads the state again. One look follows the other
in a thread of its own; the broker's clock counts.
"""

import logging
import threading
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import partial
from itertools import groupby
from typing import NamedTuple

from postdate.arrival import own_arrival
from postdate.bulk.broker_link import Link
from postdate.bulk.upload import Announced, Uploads
from postdate.client.errors import TimedOut, Unavailable, Unreachable
from postdate.contract import CANCEL, IMPORT, RUNNING, WAITING, JobOrder, Stage, State, horizon_of
from postdate.errors import FlowControl, PostdateError, Refused
from postdate.faultpoint import reach
from postdate.table.files import RowGroup, Slice, TableFolder, Window, find_beside, read_row_groups, unreadable_error
from postdate.table.find import TableReader, TableUnreadable, TableVersion
from postdate.table.format import File
from postdate.table.promoting import DueRows, name_chunk
from postdate.table.slices import Limits, plan_promotion, split_files

logger = logging.getLogger("postdate.bulk")

_PAUSE_S = 1.0  # between two looks
_LIMITS = Limits(rows=100_000, bytes=32 << 20)  # read at once, one slice after the other
_BATCH_ROWS = 16_384
_JOB_LEAD_MS = 5_000  # a pipeline that promotes takes a job's files in within this time of its command
_AWAY = (Unreachable, TimedOut, Unavailable, FlowControl)


class _OpenJob(NamedTuple):
    """A job whose files hold rows that the table does not give yet."""

    order: JobOrder
    far: int  # of its command
    brought_ms: int  # rows due until then are in the wheel

    @property
    def files(self) -> list[File]:
        """Those with rows that are not in the wheel, as they lie beside the table."""
        return [File(*file) for file in self.order.files if file.due_high > self.brought_ms]

    @property
    def next_due_ms(self) -> int:
        """The first due that may be left; only of a job that has files."""
        return max(min(file.due_low for file in self.files), self.brought_ms + 1)


class _Overtaken(PostdateError):
    """The broker has refused a stage: somebody else has promoted, or taken, before it."""


_MakeStage = Callable[[int, int, tuple[str, ...], int], Stage]  # from, to, chunks, rows read


class Promoter:
    """Promotes in place of a pipeline that does not. `table` reads the table, `uploads` writes chunks."""

    def __init__(self, link: Link, table: TableReader, uploads: Uploads) -> None:
        self._link = link
        self._table = table
        self._uploads = uploads
        self._orders: dict[int, JobOrder] = {}  # of open jobs; only bulk changes them
        self._horizon_ms = -1  # that bulk has reached last
        self._doubtful: list[str] = []  # chunks of stages that got no answer
        self._problem = ""  # of the last look
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="promoter", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Ends after the look that runs; the process does not wait for that."""
        self._ending.set()

    def _run(self) -> None:
        while not self._ending.wait(_PAUSE_S):
            try:
                self.look()
            except _AWAY as error:
                logger.debug("nothing is promoted: the broker is away: %s", error)

    def look(self) -> None:
        """Promotes what falls due and nobody else has promoted. Raises Unreachable, TimedOut, Unavailable and
        FlowControl where the broker is away; tells the broker of everything else that stands in the way.
        """
        state = self._link.state()
        try:
            self._promote(state)
            problem = ""
        except _AWAY:
            raise
        except _Overtaken as error:
            logger.info("%s", error)
            self._orders.clear()
            return
        except Exception as error:  # whatever it is, messages may be late, and the next look may find it gone
            logger.debug("cannot promote", exc_info=True)
            problem = f"{error}" or repr(error)
            self._table.close()
        # A file may have been renamed or removed since it was listed: only what stays is worth telling.
        if bool(problem) == bool(self._problem):
            self._link.tell_problem(problem)
        self._problem = problem

    def _promote(self, state: State) -> None:
        if not state.epoch or not state.table or state.rescue_lead_ms is None:
            return
        jobs = self._open_jobs(state)
        if state.horizon < state.now_ms + state.rescue_lead_ms:
            horizon_ms = max(horizon_of(state.now_ms, state.lead_ms), state.horizon)
            if state.rows_in > state.rows_out or any(job.next_due_ms <= horizon_ms for job in jobs):
                self._promote_table(state, horizon_ms)
                state = state._replace(horizon=horizon_ms)
                self._horizon_ms = horizon_ms
        # Where a pipeline promotes, it is about to take the files in: only what cannot wait for that is brought.
        until_ms = state.horizon if state.horizon == self._horizon_ms else state.now_ms + _JOB_LEAD_MS
        for job in jobs:
            if job.next_due_ms <= min(until_ms, state.horizon):
                self._bring(state, job)

    # -- the table ----------------------------------------------------------------------------------------------

    def _promote_table(self, state: State, horizon_ms: int) -> None:
        """Promotes what waits in the table up to a new horizon. Far rows that are not taken are left out: the broker
        has them in its log.
        """
        newest = self._open_table(state)
        files = [file for file in newest.files if not file.is_untaken(state.taken)]
        window = Window(-1, horizon_ms, after=state.horizon, before=state.arrival_of_taken)
        parts = plan_promotion(files, partial(_row_groups, newest.folder), window, state.taken, _LIMITS)
        taken = (state.taken, state.taken)

        def make_stage(from_ms: int, to_ms: int, chunks: tuple[str, ...], read: int) -> Stage:
            return Stage(state.epoch, taken, (from_ms, to_ms), chunks, state.rows_in, read)

        self._promote_parts(newest.folder, parts, state.epoch, (state.horizon, horizon_ms), make_stage)

    def _open_table(self, state: State) -> TableVersion:
        """Returns the newest version, if table and log fit together. Raises TableUnreadable, ForeignTable."""
        newest = self._table.newest(state.table, state.identity)
        if newest.far < state.taken:
            raise TableUnreadable(
                f"the table {state.table} ends at far row {newest.far}, but {state.taken} were taken: a pipeline that "
                "starts reads the rest again from the log"
            )
        seen = newest.seen
        is_ahead = seen is not None and (seen.epoch > state.epoch or seen.horizon > state.horizon)
        if is_ahead or newest.far > state.far_length:
            raise TableUnreadable(
                f"the table {state.table} knows more than the broker's log: the data folder was restored from an older "
                "copy. Start a pipeline: it says what to do"
            )
        return newest

    # -- jobs ---------------------------------------------------------------------------------------------------

    def _open_jobs(self, state: State) -> list[_OpenJob]:
        """Returns the jobs that bring messages by files that no batch has taken in, and have some left."""
        found = []
        known, self._orders = self._orders, {}
        for number, far in state.commands:
            order = known.get(number) or self._link.order(number)
            is_accepted = order.state == RUNNING or (order.state == WAITING and order.op == IMPORT)
            if order.op == CANCEL or is_accepted:
                self._orders[number] = order  # it changes no more, but by what is brought
            if is_accepted and order.op != CANCEL and order.brought_until_ms is not None:
                job = _OpenJob(order, far, order.brought_until_ms)
                found += [job] if job.files else []
        return found

    def _bring(self, state: State, job: _OpenJob) -> None:
        """Brings rows of a job's files, due up to the horizon, into the wheel."""
        newest, number = self._open_table(state), job.order.number
        window = Window(job.brought_ms, state.horizon, own_arrival(number), own_arrival(number + 1))
        files = [_find_file(newest.folder, file, job.far) for file in job.files if file.due_low <= state.horizon]
        # The table has cancels that came before the job's command and may be for what it brings.
        others = [
            file
            for file in newest.files
            if not file.is_untaken(state.taken) and file.due_high > window.due_low and file.due_low <= window.due_high
        ]
        parts = split_files([*files, *others], partial(_row_groups, newest.folder), window, _LIMITS)
        too_late = {part.own + row for part in job.order.parts for row in part.late}
        taken, horizon = (state.taken, state.taken), (state.horizon, state.horizon)

        def make_stage(from_ms: int, to_ms: int, chunks: tuple[str, ...], _read: int) -> Stage:
            return Stage(state.epoch, taken, horizon, chunks, state.rows_in, 0, ((number, from_ms, to_ms),))

        self._orders.pop(number)
        self._promote_parts(newest.folder, parts, state.epoch, (job.brought_ms, state.horizon), make_stage, too_late)

    # -- both ---------------------------------------------------------------------------------------------------

    def _promote_parts(
        self, folder: TableFolder, parts: list[Slice], epoch: int, span: tuple[int, int], make_stage: _MakeStage,
        left_out: Collection[int] = (),
    ) -> None:  # fmt: skip
        """Stages slices in the order of their dues, from one instant to another: what is due first comes first."""
        from_ms, end_ms = span
        for to_ms, some in _steps(parts, end_ms):
            to_ms = max(from_ms, to_ms)
            chunks: list[str] = []
            try:
                read = sum(self._write_chunk(folder, part, epoch, left_out, chunks) for part in some)
                reach("bulk.stage")
                self._stage(make_stage(from_ms, to_ms, tuple(chunks), read))
                reach("bulk.staged")
            except _AWAY:
                self._doubtful += chunks
                raise
            except BaseException:
                self._uploads.remove(chunks)
                raise
            from_ms = to_ms
            self._remove_doubtful()

    def _stage(self, stage: Stage) -> None:
        try:
            self._link.stage(stage)
        except Refused as error:
            raise _Overtaken(str(error)) from error

    def _write_chunk(
        self, folder: TableFolder, part: Slice, epoch: int, left_out: Collection[int], chunks: list[str]
    ) -> int:
        """Writes what waits of a slice as a chunk and adds its name; returns how many rows it has read."""
        with DueRows(folder, part, left_out) as rows:
            if rows.count:
                name = name_chunk(epoch)
                with self._uploads.receive(Announced(name, rows.count)) as upload:
                    for piece in rows.pieces():
                        for batch in piece.to_batches(max_chunksize=_BATCH_ROWS):
                            upload.add(batch)
                    upload.finish()
                chunks.append(name)
        return rows.read

    def _remove_doubtful(self) -> None:
        """A later stage was accepted, so those without an answer are staged by now or never will be."""
        if self._doubtful:
            staged = {chunk.name for chunk in self._link.chunks()}
            self._uploads.remove([name for name in self._doubtful if name not in staged])
            self._doubtful.clear()


def _steps(parts: Iterable[Slice], end_ms: int) -> Iterator[tuple[int, list[Slice]]]:
    """Yields slices of the same dues together, and the instant up to which everything is staged with them."""
    steps = [(due_high, list(some)) for due_high, some in groupby(parts, lambda part: part.window.due_high)]
    yield from steps[:-1]
    yield end_ms, steps[-1][1] if steps else []


def _row_groups(folder: TableFolder, path: str) -> list[RowGroup]:
    try:
        return read_row_groups(folder, path)
    except (OSError, ValueError) as error:
        raise unreadable_error(folder, path, error) from error


def _find_file(folder: TableFolder, file: File, far: int) -> File:
    """Returns a file of a job by the name that it has now."""
    try:
        return file._replace(path=find_beside(folder, file.path, far))
    except OSError as error:
        raise unreadable_error(folder, file.path, error) from error
