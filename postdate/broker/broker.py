"""The broker: a log and the state that follows from it, as calls. It has no clock, no socket and no thread of its own.

    send, cancel, stage, ...   check the call, write one batch, give a ticket
    flush                      makes everything written durable (a server calls `log.flush` on another thread)
    settle                     applies what is durable: tickets get their answers, messages become visible
    advance                    fires what is due, and rescues what the pipeline does not bring in time
    pull, find, ...            read messages
    put_topic, put_group, ...  define what messages are sent to, and who reads them

This file opens and closes a data folder and connects the parts. The calls above are the broker's own; the others are
made on the part that has them:

    view       every question about the state that changes nothing
    leases     pop, acknowledge, change the invisible time, bury
    dead_letters    which are open, and that some are done
    jobs       imports, cancels and postponements in bulk
    moves      single messages to another due
    transactions    half messages, their ends and checks
    staging    what a pipeline brings
    values     key-value settings of operators
    cancels, topics, rescuer    what stands behind the calls above

Instants come in as arguments, milliseconds of the caller's clock. A refused call has changed nothing. In flush mode
"async" a batch is applied as soon as it is written; what a pipeline may read, and the answer to a stage, still wait for
the disk.
"""

from collections.abc import Iterator, Mapping, Sequence

from postdate.arrival import NEVER
from postdate.broker import ownership
from postdate.broker.cancelling import CancelCalls
from postdate.broker.dead_letters import DeadLetterCalls
from postdate.broker.jobs import JobCalls
from postdate.broker.leasing import LeaseCalls
from postdate.broker.lookup import Found, Lookup
from postdate.broker.moving import MoveCalls
from postdate.broker.rescuing import Rescuer
from postdate.broker.retention import Retention, forget_dead_entries
from postdate.broker.sending import SendCalls
from postdate.broker.settings import CurrentSettings
from postdate.broker.staging import Staging, raise_if_refused
from postdate.broker.topics import TopicCalls
from postdate.broker.transactions import TransactionCalls
from postdate.broker.values import ValueCalls
from postdate.broker.view import View
from postdate.broker.writing import Changes, Ticket, Writer
from postdate.config import Limits, Settings, apply_changes
from postdate.contract import NO_MARKS, Stage, TableMarks
from postdate.errors import CorruptData, CorruptSnapshot, DiskFull, LogFailed, PostdateError
from postdate.message import LOOPBACK, Due, Host, Message, decode_properties, due
from postdate.state import saved
from postdate.state.fold import Fold
from postdate.storage import record as records
from postdate.storage import snapshot
from postdate.storage.batch import PIPELINE, SETTINGS, Packer
from postdate.storage.chunk import CHUNK_BIT
from postdate.storage.disk import Disk, LockedFolder
from postdate.storage.folder import open_folder, open_identity, refuse_foreign
from postdate.storage.log import Log
from postdate.storage.segment import SegmentKeeper, Segments

CHUNK_OFFSET_MAX = (1 << 63) - 1


class Broker:
    """One open data folder. Raises FolderInUse, ForeignFolder, CorruptData on opening.

    `fold` is the state itself, for those who verify it; everybody else asks `view`.
    """

    def __init__(
        self, disk: Disk, settings: Settings | None = None, store_host: Host = LOOPBACK, *,
        limits: Limits | None = None, identity: str = "",
    ) -> None:  # fmt: skip
        """`identity` is for a folder that has none yet; without it such a folder gets a random one."""
        self._settings = CurrentSettings(settings or Settings(), limits or Limits())
        self.limits = self._settings.limits
        self._disk = disk
        self.fire_failures = 0
        self.fire_error: PostdateError | None = None
        self._failed_at_ms = self.retry_at_ms = 0
        refuse_foreign(disk)
        self._lock: LockedFolder = disk.lock()
        try:
            self._open(store_host, identity)
        except BaseException:
            self._lock.release()
            raise

    # -- opening and closing ------------------------------------------------------------------------------------

    def _open(self, store_host: Host, identity: str) -> None:
        fixed = open_folder(self._disk, self.settings, self.limits)
        self.identity = open_identity(self._disk, identity)
        self._segments = Segments(self._disk, fixed["segment_bytes"])
        self._segments.remove_unfinished()
        self.log = Log(self._disk, self._segments, self.limits.unflushed_bytes_max)
        snapshot.remove_unfinished(self._disk)
        self.fold, loaded, damaged = self._load(fixed)
        self._make_parts(min(self.settings.batch_bytes_max, fixed["segment_bytes"]), store_host)
        # Apply what the log has after the snapshot.
        saved.cut_rows(self.fold)
        known_durable = max(snapshot.positions(self._disk), default=0)
        replayed_count = 0
        for batch in self.log.recover(self.fold.position, known_durable):
            self.fold.apply(batch)
            replayed_count += 1
        snapshot.remove(self._disk, damaged)  # they would count among the two that are kept
        forget_dead_entries(self.log, self.fold)
        self.transactions.resume()
        self.rescuer = Rescuer(self.log, self.fold, self._writer, self._settings)  # counts from here on
        self._retention = Retention(
            self._disk, self.log, self.fold, self._writer, self.leases, self.rescuer, self._settings,
            loaded=loaded, replayed_count=replayed_count,
        )  # fmt: skip
        self.snapshot = self._retention.take_snapshot
        # The lead decides what is near, so a replay must know where it has changed.
        if self.fold.lead_ms != self.settings.lead_ms:
            self._writer.write_system(SETTINGS, {"lead_ms": self.settings.lead_ms}, self.fold.at_ms)
            self.flush()

    def _make_parts(self, batch_bytes_max: int, store_host: Host) -> None:
        settings = self._settings
        self._writer = Writer(
            self.log, self.fold, Packer(batch_bytes_max, store_host), is_async=self.settings.flush == "async"
        )
        self._sending = SendCalls(self.fold, self._writer, settings, store_host)
        self.levels = self._sending.levels
        self._lookup = Lookup(self.fold, self.levels, batch_bytes_max)
        self.view = View(self.fold, self.log, self._segments)
        self.staging = Staging(self._disk, self.log, self.fold, self._writer, settings)
        self.jobs = JobCalls(self.fold, self._writer, settings)
        self.cancels = CancelCalls(self.fold, self._writer, self._lookup, self.jobs, settings)
        self.moves = MoveCalls(self.fold, self._writer, self._sending, settings)
        self.transactions = TransactionCalls(self.fold, self._writer, self._sending, settings)
        self.topics = TopicCalls(self.fold, self._writer, self._sending, self.view, self.cancels, settings)
        self.values = ValueCalls(self.fold, self._writer, self.topics, settings)
        self.leases = LeaseCalls(self.fold, self._writer, self._sending, self.view, self.topics, settings)
        self.dead_letters = DeadLetterCalls(self.fold, self._writer, self.view, self.topics, settings)
        # Calls that the parts answer are bound here: a method that only passes a call on would cost the hot paths a
        # tenth of a microsecond.
        self.prepare, self.write, self.settle = self._sending.prepare, self._sending.write, self._writer.settle
        self.pull, self.offsets, self.search = self.view.pull, self.view.offsets, self.view.search
        self.put_topic, self.delete_topic = self.topics.put_topic, self.topics.delete_topic
        self.put_group, self.delete_group = self.topics.put_group, self.topics.delete_group
        self.commit_offsets = self.topics.commit_offsets
        self.find, self.find_send, self.disk_space = self._lookup.find, self._lookup.find_send, self._disk.space
        self.find_pending_send = self._writer.find_pending

    def start_keeper(self) -> None:
        """Starts a helper thread that zeroes the log's segments ahead of use, until the broker is closed."""
        self.log.keeper = SegmentKeeper(self._segments)

    def _load(self, fixed: dict[str, int]) -> tuple[Fold, saved.Kept | None, list[int]]:
        """Returns the fold of the newest good snapshot, that snapshot, and those that could not be used; a fresh fold
        where no snapshot can be used and the log goes back to its beginning.
        """
        problems: list[str] = []
        damaged: list[int] = []
        for position in snapshot.positions(self._disk):
            fold = self._fresh_fold(fixed)
            try:
                saved.load(fold, snapshot.read(self._disk, position))
            except CorruptData as error:
                problems.append(str(error))
                damaged.append(position)
                continue
            return fold, saved.kept_of(fold), damaged
        if not self.log.is_whole:
            raise CorruptSnapshot(
                f"no snapshot can be used ({'; '.join(problems) or 'there is none'}) and the log is not whole "
                f"(it begins at {self.log.start}): restore the folder 'snapshots' from a copy; nothing was changed"
            )
        return self._fresh_fold(fixed), None, damaged

    def _fresh_fold(self, fixed: dict[str, int]) -> Fold:
        return Fold(
            self._disk, self.log.read, self._segments.shift, fixed["queue_file_rows"], self.limits.queue_tail_rows,
            far_block_rows=fixed["far_block_rows"], rows_by_column=self.limits.rows_by_column,
            once_ids_max=self.settings.once_ids_max, count_seconds=self.settings.due_second_messages_max > 0,
        )  # fmt: skip

    @property
    def settings(self) -> Settings:
        """Those that hold now. Nobody may keep them: an operator can change some."""
        return self._settings.now

    def change_settings(self, texts: Mapping[str, str]) -> None:
        """Changes settings by name, until the broker is closed: all of them or none. Raises UsageError."""
        self._settings.now = apply_changes(self._settings.now, texts)

    def close(self) -> None:
        """Takes a last snapshot, so that the next start replays nothing, and releases the folder."""
        try:
            if self.log.failure is None and not self._retention.is_taking_snapshot:
                self.flush()
                for step in self.snapshot():
                    if step is not None:
                        step()
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Releases the folder as it is, like a crash does; the next start recovers."""
        self.log.close()
        self.fold.chunks.close()
        self._lock.release()

    # -- sending ------------------------------------------------------------------------------------------------

    def send(self, messages: Sequence[Message], at_ms: int) -> Ticket:
        """Writes messages as one batch. A message's answer is its queue offset, or fold.WAITS while it waits.

        Raises IllegalMessage, TopicNotFound, NoPermission, FlowControl, DiskFull, LogFailed; then nothing was written.
        """
        return self.write([self.prepare(message, at_ms) for message in messages], at_ms)

    @property
    def accepted_count(self) -> int:
        """Messages written since the folder was opened."""
        return self._sending.accepted_count

    @property
    def timed_count(self) -> int:
        """Those of them that had to wait."""
        return self._sending.timed_count

    # -- durable and applied ------------------------------------------------------------------------------------

    def flush(self) -> Changes:
        """Makes everything written durable and applies it. Raises LogFailed."""
        self._writer.flush()
        return self._writer.take_changes()

    @property
    def has_changes(self) -> bool:
        """Whether something has changed that no call has returned yet."""
        return self._writer.has_changes

    # -- time ---------------------------------------------------------------------------------------------------

    def advance(self, at_ms: int) -> Changes:
        """Fires what is due at `at_ms` and rescues what the pipeline does not bring in time. `wake_at_ms` says when to
        come back.

        What it writes becomes visible after the next flush, like everything. Raises DiskFull or LogFailed where it
        could not write: nothing is half done, `fire_error` says why, and it tries again after a growing pause (until
        then a call does nothing).
        """
        if self.paused_until_ms(at_ms):
            return self._writer.take_changes()
        self._writer.apply_durable()
        try:
            self._fire_if_due(at_ms)
            self.rescuer.write_if_due(at_ms)
        except (DiskFull, LogFailed) as error:
            self._note_failure(error, at_ms)
            raise
        except OSError as error:
            failure = LogFailed(f"what is due cannot be read: {error}")
            self._note_failure(failure, at_ms)
            raise failure from error
        self.fire_failures, self.fire_error, self.retry_at_ms = 0, None, 0
        return self._writer.take_changes()

    def paused_until_ms(self, at_ms: int) -> int:
        """When `advance` tries again after a failure; 0 where it need not wait, as after a clock was set back."""
        return self.retry_at_ms if self._failed_at_ms <= at_ms < self.retry_at_ms else 0

    @property
    def wake_at_ms(self) -> int:
        """When `advance` has something to do next; NEVER where nothing waits."""
        return min(self.fold.next_at_ms, self.rescuer.next_at_ms)

    def _fire_if_due(self, at_ms: int) -> None:
        next_due = self.fold.next_at_ms
        # A pending batch of a later instant fires it when it is applied.
        if next_due <= at_ms and not self._writer.will_fire(next_due):
            self._writer.write_fire(at_ms)

    def _note_failure(self, error: PostdateError, at_ms: int) -> None:
        self.fire_failures += 1
        self.fire_error = error
        pause_ms = self.limits.fire_pause_ms_min << min(self.fire_failures - 1, 20)
        self._failed_at_ms, self.retry_at_ms = at_ms, at_ms + min(pause_ms, self.limits.fire_pause_ms_max)

    # -- cancelling ---------------------------------------------------------------------------------------------

    def cancel(self, topic: str, key: str, due_at_ms: int, at_ms: int, *, by: str = "unique") -> Ticket:
        """Cancels every message of that topic, key and due that arrived before; the answer is a CancelResult."""
        return self.cancels.cancel(topic, key, due_at_ms, at_ms, by=by)

    # -- the pipeline -------------------------------------------------------------------------------------------

    def register_pipeline(
        self, at_ms: int, *, table: str = "", master: str = "", marks: TableMarks = NO_MARKS
    ) -> Ticket:
        """Registers a pipeline; the answer is its epoch. Stages of older pipelines are refused from then on. Operators
        are shown where its table is and on which cluster it runs. Raises ForeignTable where the marks of the table say
        that it is another broker's, or that it knows more than the log.
        """
        ownership.refuse_foreign(table, marks, self.identity, self.fold.far, self.log)
        said = {"table": table, "master": master}
        self.topics.check_size("what a pipeline says of itself", said)
        return self._writer.write_system(PIPELINE, said, at_ms)

    def stage(self, stage: Stage, at_ms: int) -> None:
        """Brings uploaded chunks into the wheel and moves taken and horizon, durable on return: the three steps of
        `staging`, on the caller's thread.

        Raises Refused for a stage that is stale, repeated or overtaken; CorruptChunk for a file that is not whole.
        """
        self._writer.flush()
        self.staging.check(stage)
        ticket = self.staging.write(stage, self.staging.verify(stage), at_ms)
        self._writer.flush()
        raise_if_refused(ticket.answer)

    # -- reading ------------------------------------------------------------------------------------------------

    def read_record(self, offset: int) -> bytes:
        """Returns the record of a message at an offset of the log or a chunk, visible or not; empty where there is
        none. The offset may be anything: a client names it.
        """
        logged = self._lookup.logged(offset) if self._may_be_looked_at(offset) else None
        return logged.data if logged else b""

    def _may_be_looked_at(self, offset: int) -> bool:
        return 0 <= offset < self.log.durable or CHUNK_BIT <= offset <= CHUNK_OFFSET_MAX

    def find_at(self, offset: int, *, store_host: Host | None = None) -> Iterator[Found | None]:
        """Finds out about the message at an offset: yields None for each step, then at most one Found."""
        return self._lookup.find_at(offset, store_host) if self._may_be_looked_at(offset) else iter(())

    def due_of(self, record: records.Record) -> Due:
        """Returns when a stored record is or was due, by what the delay levels mean today."""
        return due(decode_properties(record.properties), record.stored_at_ms, self.levels, NEVER)

    # -- snapshots and retention --------------------------------------------------------------------------------

    @property
    def snapshot_is_due(self) -> bool:
        """Whether a crash now would have to replay more than the settings want."""
        return self._retention.is_snapshot_due

    @property
    def bytes_since_snapshot(self) -> int:
        return self._retention.bytes_since_snapshot

    @property
    def batches_since_snapshot(self) -> int:
        return self._retention.batches_since_snapshot

    def retain(self, at_ms: int) -> int:
        """Removes segments and chunks that nobody needs any more; returns how many files."""
        return self._retention.retain(at_ms)
