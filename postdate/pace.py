"""Pacing: a large file goes to the disk while it is written.

One large sync at its end would keep the disk busy for so long that the broker's small ones, for which sends and fires
wait, would take some ten milliseconds; and whoever writes it would wait, too, with a processor that has nothing to do.
Executors import this: the standard library is all it may need.
"""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

PACE_BYTES = 2 << 20  # written before they are synced


class Pacer:
    """Of one file: has it synced on another thread, every few bytes. Never two syncs at once: the writer waits."""

    def __init__(self, sync: Callable[[], None]) -> None:
        self._sync = sync
        self._thread = ThreadPoolExecutor(1)
        self._under_way: Future[None] | None = None
        self._unsynced = 0

    def wrote(self, size: int) -> None:
        """So many bytes more are written. Raises what a sync before has raised."""
        self._unsynced += size
        if self._unsynced >= PACE_BYTES:
            self._unsynced = 0
            self._wait()
            self._under_way = self._thread.submit(self._sync)

    def close(self) -> None:
        """Returns when no sync is under way. Raises what the last has raised."""
        self._thread.shutdown()
        self._wait()

    def _wait(self) -> None:
        under_way, self._under_way = self._under_way, None
        if under_way is not None:
            under_way.result()
