"""The history: what each batch did, as a small Delta table beside the messages."""

import logging
import os
import shutil
from typing import Any, get_type_hints

import pyarrow as pa
from deltalake import DeltaTable, write_deltalake
from deltalake.exceptions import DeltaError

from postdate.contract import Report

logger = logging.getLogger("postdate.pipeline")

_TYPES = {int: pa.int64(), float: pa.float64(), str: pa.string()}
SCHEMA = pa.schema([pa.field(name, _TYPES[kind]) for name, kind in get_type_hints(Report).items()])
_COMPACT_EVERY = 200  # batches
_KEEP_MS = 30 * 86_400_000


class History:
    """One row per batch, for people. A batch does not depend on it, and it is not synced: a power loss may leave it
    unreadable; then it is set aside and begun anew.
    """

    def __init__(self, uri: str) -> None:
        self._uri = uri
        self._appended = 0

    def append(self, report: dict[str, Any]) -> None:
        try:
            self._append(report)
        except (DeltaError, OSError) as error:
            logger.warning("the history %s cannot be written and is begun anew: %s", self._uri, error)
            if os.path.isdir(self._uri):  # elsewhere writes are durable
                shutil.rmtree(f"{self._uri}.torn", ignore_errors=True)
                os.replace(self._uri, f"{self._uri}.torn")
            self._append(report)

    def _append(self, report: dict[str, Any]) -> None:
        rows = pa.Table.from_pylist([report], SCHEMA)
        write_deltalake(self._uri, rows, mode="append", schema_mode="merge")  # an older version had fewer columns
        self._appended += 1
        if self._appended % _COMPACT_EVERY == 0:
            self._compact(report["at_ms"])

    def _compact(self, now_ms: int) -> None:
        table = DeltaTable(self._uri)
        table.delete(f"at_ms < {now_ms - _KEEP_MS}")
        table.optimize.compact()
        table.create_checkpoint()
        table.cleanup_metadata()
        table.vacuum(retention_hours=1, dry_run=False, enforce_retention_duration=False)

    def last(self, count: int) -> list[dict[str, Any]]:
        """The newest rows, the oldest first; none where the table is new, or cannot be read."""
        try:
            rows = DeltaTable(self._uri).to_pyarrow_table()
        except (DeltaError, OSError, pa.ArrowException):
            return []
        found: list[dict[str, Any]] = rows.sort_by("at_ms").to_pylist()[-count:]
        return found
