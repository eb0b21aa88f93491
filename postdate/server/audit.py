"""The audit log: who changed what, and who was refused, as lines of JSON in the folder `audit` of the data folder.

    {"at": "2026-03-01T08:00:00.123Z", "user": "alice", "address": "10.0.0.7", "request": "DELETE_TOPIC_IN_BROKER",
     "resource": "Topic:orders", "result": "done"}

    done       it was carried out
    refused    the one who asked may not, or has not proved who they are; `reason` says which. `more` is how many others
               of the same user, address and request came within the same second
    failed     it was allowed and went wrong, as `reason` says
    unknown    the connection ended before the answer, or nobody waited for one: it may have been carried out

Lines are written by another thread, so the loop never waits for the disk. What waits is bounded, and what a disk does
not take is counted: the broker goes on, and a line says how many lines are missing (`lost`). Refusals have files of
their own, so that a flood of them pushes no change out. Lines survive the end of the process, but a power loss may take
the last ones.
"""

import asyncio
import contextlib
import heapq
import json
import os
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from postdate.clock import Clock
from postdate.config import Limits
from postdate.wire import codes
from postdate.wire.frame import Command

AUDIT_FOLDER, SUFFIX = "audit", ".jsonl"
SERIES = ("changes", "refusals")
TICK_MS = 1_000
_FOLDER_MODE, _FILE_MODE = 0o700, 0o600
_TEXT_CHARACTERS_MAX = 500  # of a name or a reason, which a peer may choose
_OTHERS = ("", "", "")

Line = dict[str, Any]
Complain = Callable[[str], None]


class Audit:
    """The audit log of one server. Its methods are called on the loop's thread."""

    def __init__(self, folder: Path, clock: Clock, limits: Limits, complain: Complain) -> None:
        self._clock = clock
        self._changes, self._refusals = (
            _Series(_Files(folder / AUDIT_FOLDER, name, limits), limits.audit_lines_max, complain, self._begin_lost)
            for name in SERIES
        )
        self._keys_max = limits.audit_keys_max
        self._refused: dict[tuple[str, str, str], tuple[int, Line]] = {}  # in this second: how many more, and the first

    # -- what happens -------------------------------------------------------------------------------------------

    def begin(self, user: str, address: str, request: str, resource: str) -> Line:
        """Returns the line of a request that is allowed; `end` writes it."""
        at = datetime.fromtimestamp(self._clock.now_ms() / 1_000, UTC).isoformat(timespec="milliseconds")
        names = {"user": user, "address": address, "request": request, "resource": resource[:_TEXT_CHARACTERS_MAX]}
        return {"at": at.replace("+00:00", "Z"), **names}

    def end(self, line: Line, answer: Command | None) -> None:
        """Writes the line of a request with its answer; None where there is none."""
        if answer is None:
            self._changes.add(line | {"result": "unknown"})
        elif answer.code == codes.SUCCESS:
            self._changes.add(line | {"result": "done"})
        else:
            result = "refused" if answer.code == codes.NO_PERMISSION else "failed"
            self._changes.add(line | {"result": result, "reason": (answer.remark or "")[:_TEXT_CHARACTERS_MAX]})

    def note_refusal(self, user: str, address: str, request: str, resource: str, reason: str) -> None:
        """Writes a line about a request that is refused: one a second for a user, an address and a request."""
        key = (user, address, request)
        if key not in self._refused and len(self._refused) >= self._keys_max:
            key = _OTHERS
        if key in self._refused:
            count, line = self._refused[key]
            self._refused[key] = count + 1, line
            return
        line = self.begin(*(key if key == _OTHERS else (user, address, request)), resource)
        line |= {"result": "refused", "reason": reason[:_TEXT_CHARACTERS_MAX]}
        self._refused[key] = 0, line
        self._refusals.add(line)

    def tick(self) -> None:
        """Says what was refused more often than once. Called once a second."""
        refused, self._refused = self._refused, {}
        for count, line in refused.values():
            if count:
                self._refusals.add(line | {"more": count})

    def _begin_lost(self, count: int) -> Line:
        return self.begin("", "", "", "") | {"result": "lost", "more": count}

    async def close(self) -> None:
        """Writes what is left."""
        self.tick()
        for series in (self._changes, self._refusals):
            await series.finish()


class _Series:
    """Lines on their way into one series of files."""

    def __init__(self, files: "_Files", lines_max: int, complain: Complain, begin_lost: Callable[[int], Line]) -> None:
        self._files, self._lines_max, self._complain, self._begin_lost = files, lines_max, complain, begin_lost
        self._waiting: list[Line] = []
        self._lost_count = 0
        self._writing: asyncio.Task[None] | None = None

    def add(self, line: Line) -> None:
        if len(self._waiting) >= self._lines_max:
            self._lost_count += 1
            return
        self._waiting.append(line)
        if self._writing is None:
            self._writing = asyncio.get_running_loop().create_task(self._write_waiting())

    async def _write_waiting(self) -> None:
        try:
            while self._waiting:
                lines, self._waiting = self._waiting, []
                lost_count, self._lost_count = self._lost_count, 0
                count = lost_count + len(lines)
                if lost_count:
                    lines.insert(0, self._begin_lost(lost_count))
                try:
                    await asyncio.to_thread(self._files.append, lines)
                except OSError as error:
                    self._lost_count += count
                    self._complain(f"the audit log cannot be written: {error.strerror}; lines are missing there")
        finally:
            self._writing = None

    async def finish(self) -> None:
        if self._writing is not None:
            await self._writing


class _Files:
    """A series of files, numbered from 1 on: the last one grows, and the oldest goes."""

    def __init__(self, folder: Path, series: str, limits: Limits) -> None:
        self._folder, self._series = folder, series
        self._bytes_max, self._count_max = limits.audit_bytes_max, limits.audit_files_max
        self._is_whole = False  # whether the last file is known to end with a whole line

    def append(self, lines: list[Line]) -> None:
        """Raises OSError."""
        self._folder.mkdir(mode=_FOLDER_MODE, exist_ok=True)
        files = audit_files(self._folder, self._series)
        path = files[-1] if files else self._path(1)
        if files and path.stat().st_size >= self._bytes_max:
            path = self._path(_number_of(path) + 1)
            files.append(path)
        data = b"".join(json.dumps(line, ensure_ascii=False).encode(errors="replace") + b"\n" for line in lines)
        with open(os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, _FILE_MODE), "r+b", buffering=0) as file:
            if (
                not self._is_whole
                and file.seek(0, os.SEEK_END)
                and os.pread(file.fileno(), 1, file.tell() - 1) != b"\n"
            ):
                data = b"\n" + data  # a line that a crash or a full disk has cut off
            self._is_whole = False
            while data:
                data = data[file.write(data) :]
            self._is_whole = True
        for old in files[: -self._count_max]:
            old.unlink()

    def _path(self, number: int) -> Path:
        return self._folder / f"{self._series}-{number:08}{SUFFIX}"


def _number_of(path: Path) -> int:
    return int(path.stem.rpartition("-")[2])


def audit_files(folder: Path, series: str) -> list[Path]:
    """Returns the files of a series in an audit folder, the oldest first."""
    found = [path for path in folder.glob(f"{series}-*{SUFFIX}") if path.stem.rpartition("-")[2].isdecimal()]
    return sorted(found, key=_number_of)


def read_audit(folder: Path) -> Iterator[Line]:
    """Yields the lines of an audit folder, the oldest first; without those that a crash has cut off."""
    return heapq.merge(*(_read_series(folder, series) for series in SERIES), key=lambda line: str(line.get("at", "")))


def _read_series(folder: Path, series: str) -> Iterator[Line]:
    for path in audit_files(folder, series):
        with contextlib.suppress(FileNotFoundError), open(path, "rb") as file:  # rotation may remove it meanwhile
            for data in file:
                with contextlib.suppress(ValueError):
                    line = json.loads(data)
                    if isinstance(line, dict):
                        yield line
