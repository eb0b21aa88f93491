"""The table of far messages: a Delta table, its place in the far queue, and the files that are in it.

Two transaction versions make it know its own place: `far`, up to which row of the far queue it has taken, and `rows`,
how many rows were ever appended for them. A commit is not retried: where the next version exists, another writer
lives.
"""

import json
import os
import time
from collections.abc import Iterable, Sequence

from deltalake import CommitProperties, DeltaTable, PostCommitHookProperties, Transaction
from deltalake.exceptions import CommitFailedError, DeltaError, TableNotFoundError
from deltalake.transaction import AddAction, RemoveAction

from postdate.errors import CorruptTable, Refused
from postdate.pipeline.columns import SCHEMA
from postdate.pipeline.files import File, Group, Place, Window, Written, read_groups, touches
from postdate.pipeline.steps import reach

FAR, ROWS = "postdate-far", "postdate-rows"
_LOG = "_delta_log"
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
        self.place.sync([_entry(0)])
        self.place.sync_folders()
        return delta

    def _set_torn_aside(self) -> None:
        """The newest entry of the log may be cut: it was not synced yet, so nothing was staged by it."""
        folder = self.place.path(_LOG)
        names = sorted(n for n in (os.listdir(folder) if os.path.isdir(folder) else ()) if _is_entry(n))
        if names and not _is_whole(f"{folder}/{names[-1]}"):
            os.replace(f"{folder}/{names[-1]}", f"{folder}/{names[-1]}.torn")
            self.torn.append(names[-1])

    def _active(self) -> Iterable[File]:
        actions = self._delta.get_add_actions(flatten=True)
        names = ("path", "size_bytes", "num_records", "min.due", "max.due", "min.arrival", "max.arrival")
        present = set(actions.column_names)
        if actions.num_rows and not present.issuperset(names):
            raise CorruptTable(f"the table {self.place.uri} has files without statistics of due and arrival")
        return map(File, *(actions.column(name).to_pylist() for name in names)) if actions.num_rows else ()

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
        self.place.sync([_entry(version)])
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
            names = [n for n in os.listdir(self.place.path(_LOG)) if n.startswith(f"{version:020d}.checkpoint")]
            self.place.sync([*(f"{_LOG}/{name}" for name in names), f"{_LOG}/_last_checkpoint"])
        self._delta.cleanup_metadata()
        self.remove_old_files()
        return True

    def remove_old_files(self, retention_hours: int = 1) -> None:
        """Removes files that left the table an hour ago, and those that a task wrote for a batch that failed."""
        self._delta.vacuum(retention_hours, dry_run=False, enforce_retention_duration=False)
        self._delta.update_incremental()

    def log_bytes(self) -> int:
        """The size of the Delta log."""
        return sum(self.place.sizes(_LOG).values())


def _entry(version: int) -> str:
    return f"{_LOG}/{version:020d}.json"


def _is_entry(name: str) -> bool:
    return len(name) == 25 and name.endswith(".json") and name[:20].isdigit()


def _is_whole(path: str) -> bool:
    with open(path, "rb") as handle:
        lines = handle.read().splitlines()
    try:
        return bool(lines) and all(isinstance(json.loads(line), dict) for line in lines if line.strip())
    except ValueError:
        return False
