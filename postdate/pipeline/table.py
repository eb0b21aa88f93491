"""The table of far messages: a Delta table, its place in the far queue, and the files that are in it.

Two transaction versions make it know its own place: `far`, up to which row of the far queue it has taken, and `rows`,
how many rows were ever appended for them. A commit is not retried: where the next version exists, another writer
lives.
"""

import os
import time
from collections.abc import Sequence
from pathlib import Path

from deltalake import CommitProperties, DeltaTable, PostCommitHookProperties, Transaction
from deltalake.exceptions import CommitFailedError, DeltaError, TableNotFoundError
from deltalake.transaction import AddAction, RemoveAction

from postdate.errors import CorruptTable, Refused
from postdate.pipeline.files import Group, Place, Window, Written, read_groups, touches
from postdate.pipeline.steps import reach
from postdate.table_format import FAR, LOG, ROWS, SCHEMA, File, entry, files_of, is_whole, versions

_CHECKPOINT_EVERY = 100  # commits
_GROUPS_KEPT = 2_000  # files whose row groups are remembered
_NO_HOOKS = PostCommitHookProperties(create_checkpoint=False, cleanup_expired_logs=False)
# An entry of the Delta log is of use only until a checkpoint says the same.
_CONFIGURATION: dict[str, str | None] = {
    "delta.logRetentionDuration": "interval 1 hours",
    "delta.checkpointInterval": str(_CHECKPOINT_EVERY),
}


class Table:
    """The one writer of a table. Raises CorruptTable where it cannot be read, Refused where another writer lives."""

    def __init__(self, uri: str) -> None:
        self.place = Place(uri)
        self.torn: list[str] = []  # entries of the Delta log that a power loss had cut, and that were set aside
        self._delta = self._opened()
        self.files: dict[str, File] = {file.path: file for file in self._active()}
        self._groups: dict[str, list[Group]] = {}
        self._commits = 0

    # -- opening ------------------------------------------------------------------------------------------------

    def _opened(self) -> DeltaTable:
        if self.place.is_local:
            os.makedirs(self.place.base, exist_ok=True)
            self._set_torn_aside()
        try:
            return DeltaTable(self.place.uri)
        except TableNotFoundError:
            return self._created()
        except (DeltaError, OSError) as error:
            raise CorruptTable(f"the table {self.place.uri} cannot be opened: {error}") from error

    def _created(self) -> DeltaTable:
        delta = DeltaTable.create(self.place.uri, schema=SCHEMA, configuration=_CONFIGURATION)
        self.place.sync([entry(0)])
        self.place.sync_folders()
        return delta

    def _set_torn_aside(self) -> None:
        """The newest entry of the log may be cut: it was not synced yet, so nothing was staged by it."""
        folder = self.place.path(LOG)
        known = versions(os.listdir(folder) if os.path.isdir(folder) else ())
        newest = self.place.path(entry(known[-1])) if known else ""
        if newest and not is_whole(Path(newest).read_bytes()):
            os.replace(newest, f"{newest}.torn")
            self.torn.append(os.path.basename(newest))

    def _active(self) -> list[File]:
        files = files_of(self._delta)
        for file in files:
            if None in file:
                raise CorruptTable(f"{file.path} of the table {self.place.uri} has no statistics of due and arrival")
        return files

    # -- what it says -------------------------------------------------------------------------------------------

    @property
    def far(self) -> int:
        """Rows of the far queue before this one are in the table."""
        return self._delta.transaction_version(FAR) or 0

    @property
    def rows(self) -> int:
        """Rows that were ever appended for them."""
        return self._delta.transaction_version(ROWS) or 0

    @property
    def bytes(self) -> int:
        return sum(file.bytes for file in self.files.values())

    def touched(self, window: Window) -> list[File]:
        """Files that may hold rows of a window."""
        return [file for file in self.files.values() if touches(file, window)]

    def groups(self, path: str) -> list[Group]:
        """The row groups of a file; remembered, because a file is asked about every minute while its rows fall due."""
        found = self._groups.get(path)
        if found is None:
            try:
                found = read_groups(self.place, path)
            except (OSError, ValueError) as error:
                raise CorruptTable(f"{path} of the table {self.place.uri} cannot be read: {error}") from error
            self._remember(path, found)
        return found

    def _remember(self, path: str, groups: list[Group]) -> None:
        while len(self._groups) >= _GROUPS_KEPT:
            del self._groups[next(iter(self._groups))]
        self._groups[path] = groups

    def missing(self) -> list[File]:
        """Files of the table that are not there, or not as long as they should be."""
        sizes = self.place.sizes()
        return [file for file in self.files.values() if sizes.get(file.path) != file.bytes]

    # -- changing -----------------------------------------------------------------------------------------------

    def commit(
        self,
        added: Sequence[Written] = (),
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
        versions = [Transaction(name, value) for name, value in ((FAR, far), (ROWS, rows)) if value is not None]
        version = self._delta.version() + 1
        reach("table.commit")
        try:
            self._delta.create_write_transaction(
                actions, "append", SCHEMA,
                commit_properties=CommitProperties(max_commit_retries=0, app_transactions=versions),
                post_commithook_properties=_NO_HOOKS,
            )  # fmt: skip
        except CommitFailedError as error:
            raise Refused(f"version {version} of the table {self.place.uri} exists: another writer lives") from error
        reach("table.committed")
        self.place.sync([entry(version)])
        reach("table.synced")
        self._note(version, added, removed)

    def _note(self, version: int, added: Sequence[Written], removed: Sequence[File]) -> None:
        self._delta.update_incremental()
        if self._delta.version() != version:
            raise Refused(f"the table {self.place.uri} is at version {self._delta.version()}, not {version}")
        for file in removed:
            self.files.pop(file.path, None)
            self._groups.pop(file.path, None)
        for file, groups in added:
            self.files[file.path] = file
            self._remember(file.path, groups)
        self._commits += 1

    # -- keeping it small ---------------------------------------------------------------------------------------

    def tidy(self) -> bool:
        """From time to time: writes a checkpoint of the Delta log and removes what is not needed any more."""
        if self._commits < _CHECKPOINT_EVERY:
            return False
        self._commits = 0
        self._delta.create_checkpoint()
        version = self._delta.version()
        if self.place.is_local:
            names = [n for n in os.listdir(self.place.path(LOG)) if n.startswith(f"{version:020d}.checkpoint")]
            self.place.sync([*(f"{LOG}/{name}" for name in names), f"{LOG}/_last_checkpoint"])
        self._delta.cleanup_metadata()
        self.remove_old_files()
        return True

    def remove_old_files(self) -> None:
        """Removes files that left the table an hour ago, and those that a task wrote for a batch that failed."""
        self._delta.vacuum(retention_hours=1, dry_run=False, enforce_retention_duration=False)
        self._delta.update_incremental()

    def log_bytes(self) -> int:
        """The size of the Delta log."""
        return sum(self.place.sizes(LOG).values())
