"""The table of far messages: a Delta table, its place in the far queue, and its files.

Two transaction versions hold its place: `far`, up to which row of the far queue it has taken, and `rows`, how many rows
it ever appended for them. Others say which place of the log it has seen (identity.py). A commit is not retried: where
the next version exists, another writer is at work.
"""

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pyarrow.parquet as pq
from deltalake import CommitProperties, DeltaTable, PostCommitHookProperties, Transaction
from deltalake.exceptions import CommitFailedError, DeltaError, TableNotFoundError
from deltalake.transaction import AddAction, RemoveAction

from postdate.contract import NamedQueues, State, TableMarks, dump
from postdate.errors import CorruptTable, Refused
from postdate.faultpoint import reach
from postdate.process import make_private_folder
from postdate.table import identity
from postdate.table.files import (
    RowGroup,
    TableFolder,
    WrittenFile,
    read_row_groups,
    remove_idle_indexes,
    unreadable_error,
)
from postdate.table.format import (
    ACTIONS,
    FAR_TRANSACTION,
    LOG,
    ROWS_TRANSACTION,
    SCHEMA,
    File,
    count_sound,
    entry_path,
    list_files,
    parse_versions,
)

_HINT = f"{LOG}/_last_checkpoint"
_CHECKPOINT_EVERY = 100  # commits
_FILES_REMEMBERED_MAX = 2_000  # with their row groups
_NO_HOOKS = PostCommitHookProperties(create_checkpoint=False, cleanup_expired_logs=False)
# An entry of the Delta log is useful only until a checkpoint holds the same.
_CONFIGURATION: dict[str, str | None] = {
    "delta.logRetentionDuration": "interval 1 hours",
    "delta.deletedFileRetentionDuration": "interval 1 hours",
    "delta.checkpointInterval": str(_CHECKPOINT_EVERY),
    # Otherwise deltalake takes a missing statistic for null, and its dataset finds no row by any other column.
    "delta.dataSkippingStatsColumns": "due,arrival",
}


class Table:
    """Writes a table; each table has one writer. Raises CorruptTable where it cannot be read, Refused where there is
    another writer.
    """

    def __init__(self, uri: str) -> None:
        self.folder = TableFolder(uri)
        self.torn: list[str] = []  # entries of the Delta log that a power loss cut; they are renamed
        self._groups: dict[str, list[RowGroup]] = {}
        self._commits = 0
        self._seen: identity.Seen | None = None
        self._delta, self.files = self._open()

    # -- opening ------------------------------------------------------------------------------------------------

    def _open(self) -> tuple[DeltaTable, dict[str, File]]:
        if self.folder.is_local:
            make_private_folder(self.folder.base)
            self._set_torn_aside()
        try:
            return self._read()
        except TableNotFoundError:
            return self._create(), {}
        except (DeltaError, OSError) as error:
            if not self._set_checkpoints_aside():
                raise self._unreadable(error) from error
        try:
            return self._read()
        except (DeltaError, OSError) as error:
            raise self._unreadable(error) from error

    def _read(self) -> tuple[DeltaTable, dict[str, File]]:
        delta = DeltaTable(self.folder.uri)
        files = list_files(delta)
        for file in files:
            if None in file:
                raise CorruptTable(f"{file.path} of the table {self.folder.uri} has no statistics of due and arrival")
        return delta, {file.path: file for file in files}

    def _unreadable(self, error: Exception) -> CorruptTable:
        return CorruptTable(f"the table {self.folder.uri} cannot be opened: {error}")

    def refresh(self) -> None:
        """Opens the table again: another writer may have changed it."""
        self._delta, self.files = self._open()

    def _create(self) -> DeltaTable:
        delta = DeltaTable.create(
            self.folder.uri, schema=SCHEMA, configuration=_CONFIGURATION,
            commit_properties=CommitProperties({ACTIONS: "2"}),
        )  # fmt: skip
        self.folder.sync([entry_path(0)])
        self.folder.sync_folders()
        return delta

    def _set_torn_aside(self) -> None:
        """Renames torn entries, the newest ones. They were not synced, so no stage relies on them."""
        known = parse_versions(self._log_names())
        count = count_sound(known, lambda version: Path(self.folder.path(entry_path(version))).read_bytes())
        self._set_aside([entry_path(version) for version in known[count:]])

    def _set_checkpoints_aside(self) -> bool:
        """Renames checkpoints that cannot be read. The entries hold the same: they are removed only when a checkpoint
        is durable. Returns whether there were any.
        """
        if not self.folder.is_local:
            return False
        names = [f"{LOG}/{name}" for name in self._log_names()]
        bad = [name for name in names if _is_checkpoint(name) and not is_readable(self.folder.path(name))]
        hints = [name for name in names if name == _HINT]
        self._set_aside(bad + hints)
        return bool(bad or hints)

    def _log_names(self) -> list[str]:
        folder = self.folder.path(LOG)
        return sorted(os.listdir(folder)) if os.path.isdir(folder) else []

    def _set_aside(self, names: list[str]) -> None:
        for name in names:
            os.replace(self.folder.path(name), self.folder.path(f"{name}.torn"))
            self.torn.append(os.path.basename(name))

    # -- reading ------------------------------------------------------------------------------------------------

    @property
    def far(self) -> int:
        """The table holds the rows of the far queue before this one."""
        return self._delta.transaction_version(FAR_TRANSACTION) or 0

    @property
    def rows(self) -> int:
        """How many rows it ever appended for them."""
        return self._delta.transaction_version(ROWS_TRANSACTION) or 0

    @property
    def marks(self) -> TableMarks:
        """Whose it is, and what it knows of that broker's log."""
        return identity.read_marks(self._delta)

    @property
    def bytes(self) -> int:
        return sum(file.bytes for file in self.files.values())

    def row_groups(self, path: str) -> list[RowGroup]:
        """Returns the row groups of a file. Remembers them, because every minute asks while rows of a file fall due."""
        found = self._groups.get(path)
        if found is None:
            try:
                found = read_row_groups(self.folder, path)
            except (OSError, ValueError) as error:
                raise unreadable_error(self.folder, path, error) from error
            self._remember(path, found)
        return found

    def _remember(self, path: str, groups: list[RowGroup]) -> None:
        while len(self._groups) >= _FILES_REMEMBERED_MAX:
            del self._groups[next(iter(self._groups))]
        self._groups[path] = groups

    def missing_files(self) -> list[File]:
        """Returns the files of the table that are gone or have another length."""
        sizes = self.folder.sizes()
        return [file for file in self.files.values() if sizes.get(file.path) != file.bytes]

    # -- changing -----------------------------------------------------------------------------------------------

    def see(self, state: State) -> None:
        """Notes the broker's state: what is committed from now on follows it."""
        self._seen = identity.seen_in(state) or self._seen

    def stamp(self, owner: str, seen: identity.Seen | None = None) -> None:
        """Makes it the table of the broker of this identity, durable on return. `seen` is for one that begins anew."""
        self._seen = seen or self._seen
        self._set_property(identity.PROPERTY, owner)

    def name_queues(self, queues: NamedQueues) -> None:
        """Writes down what the queue numbers in its rows mean, durable on return."""
        if identity.read_queues(self._delta) != queues:
            self._set_property(identity.QUEUES, dump(queues._asdict()).decode())

    def _set_property(self, name: str, value: str) -> None:
        self._write(
            lambda properties: self._delta.alter.set_table_properties(
                {name: value}, raise_if_not_exists=False, commit_properties=properties,
                post_commithook_properties=_NO_HOOKS,
            ),
            1, self._places(),
        )  # fmt: skip

    def commit(
        self,
        added: Sequence[WrittenFile] = (),
        removed: Sequence[File] = (),
        *,
        far: int | None = None,
        rows: int | None = None,
    ) -> None:
        """Adds and removes files in one step, durable on return."""
        now_ms = int(time.time() * 1_000)
        actions: list[AddAction | RemoveAction] = [
            AddAction(file.path, file.bytes, {}, now_ms, True, file.stats()) for file, _ in added
        ]
        actions += [RemoveAction(file.path, True, now_ms, file.bytes, {}) for file in removed]
        self._write(
            lambda properties: self._delta.create_write_transaction(
                actions, "append", SCHEMA, commit_properties=properties, post_commithook_properties=_NO_HOOKS
            ),
            len(actions), self._places(far, rows), added, removed,
        )  # fmt: skip

    def _places(self, far: int | None = None, rows: int | None = None) -> list[Transaction]:
        seen = self._seen.transactions if self._seen else {}
        values = {FAR_TRANSACTION: far, ROWS_TRANSACTION: rows} | seen
        return [Transaction(name, value) for name, value in values.items() if value is not None]

    def _write(
        self,
        write: Callable[[CommitProperties], object],
        actions: int,
        places: list[Transaction],
        added: Sequence[WrittenFile] = (),
        removed: Sequence[File] = (),
    ) -> None:
        version = self._delta.version() + 1
        count = {ACTIONS: str(actions + len(places))}
        reach("table.commit")
        try:
            write(CommitProperties(count, max_commit_retries=0, app_transactions=places))
        except CommitFailedError as error:
            raise Refused(
                f"version {version} of the table {self.folder.uri} exists: another writer is at work"
            ) from error
        reach("table.committed")
        self.folder.sync([entry_path(version)])
        reach("table.synced")
        self._note(version, added, removed)

    def take(self, files: Sequence[WrittenFile], far: int) -> None:
        """Adds files that hold all that the table lacked of the far queue up to a row."""
        self.commit(files, far=far, rows=self.rows + sum(file.rows for file, _ in files))

    def _note(self, version: int, added: Sequence[WrittenFile], removed: Sequence[File]) -> None:
        self._delta.update_incremental()
        if self._delta.version() != version:
            raise Refused(f"the table {self.folder.uri} is at version {self._delta.version()}, not {version}")
        for file in removed:
            self.files.pop(file.path, None)
            self._groups.pop(file.path, None)
        for file, groups in added:
            self.files[file.path] = file
            self._remember(file.path, groups)
        self._commits += 1

    # -- cleaning up --------------------------------------------------------------------------------------------

    def tidy(self) -> bool:
        """After some commits: writes a checkpoint of the Delta log, removes old entries and files, and returns True."""
        if self._commits < _CHECKPOINT_EVERY:
            return False
        self._commits = 0
        self._delta.create_checkpoint()
        version = self._delta.version()
        if self.folder.is_local:
            names = [f"{LOG}/{name}" for name in self._log_names() if name.startswith(f"{version:020d}.checkpoint")]
            self.folder.sync([*names, _HINT])
        self._delta.cleanup_metadata()
        self.remove_old_files()
        return True

    def remove_old_files(self, retention_hours: int = 1) -> None:
        """Removes files that left the table an hour ago, and those that a failed batch wrote; and their indexes."""
        before = self._delta.version()
        self._delta.vacuum(
            retention_hours, dry_run=False, enforce_retention_duration=False, full=True,
            post_commithook_properties=_NO_HOOKS,
        )  # fmt: skip
        remove_idle_indexes(self.folder)
        self._delta.update_incremental()
        # Vacuum has written entries of its own; a later commit counts only where they are durable, too.
        self.folder.sync([entry_path(version) for version in range(before + 1, self._delta.version() + 1)])

    def log_bytes(self) -> int:
        """Returns the size of the Delta log."""
        return sum(self.folder.sizes(LOG).values())


def _is_checkpoint(name: str) -> bool:
    return ".checkpoint." in name and name.endswith(".parquet")


def is_readable(path: str | os.PathLike[str]) -> bool:
    """Returns whether a Parquet file, such as a checkpoint of the Delta log, is whole."""
    try:
        pq.read_table(path)
    except (OSError, ValueError):
        return False
    return True
