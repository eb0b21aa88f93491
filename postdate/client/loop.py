"""An event loop in a thread of its own, for callers that block."""

import asyncio
import concurrent.futures
import os
import threading
from collections.abc import Callable, Coroutine
from contextlib import suppress
from inspect import CORO_CREATED, getcoroutinestate
from typing import Any, TypeVar

from postdate.errors import UsageError
from postdate.process import new_event_loop

Result = TypeVar("Result")

# How often a caller who waits looks whether the thread he waits for still lives.
LIFE_SIGN_SECONDS = 1.0
# How long the thread may take to end. It is held up only by a name that is being looked up, and then ends later.
_END_SECONDS = 1.0


class Closed(UsageError):
    def __init__(self) -> None:
        super().__init__("the client is closed")


class LoopThread:
    """An event loop in a daemon thread, for any number of callers."""

    def __init__(self) -> None:
        """Raises what keeps the loop from running, such as too many open files."""
        self._pid = os.getpid()
        self._started: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._thread = threading.Thread(target=self._main, name="postdate-client", daemon=True)
        self._thread.start()
        self._started.result()

    def _main(self) -> None:
        try:
            with asyncio.Runner(loop_factory=new_event_loop) as runner:
                runner.run(self._until_stopped())
        except BaseException as error:
            if self._started.done():
                raise
            self._started.set_exception(error)

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    async def _until_stopped(self) -> None:
        """What still runs when this returns is cancelled by the runner."""
        self._loop = asyncio.get_running_loop()
        self._stopping = asyncio.Event()
        self._started.set_result(None)
        await self._stopping.wait()

    def run(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Runs a coroutine to its end; called from any thread but the loop's. An interrupt cancels it."""
        if self.is_forked:
            work.close()
            raise UsageError(
                f"process {self._pid} made the client, and this is process {os.getpid()}, which was forked from it; "
                "make a client in each process"
            )
        if self.is_ours:
            work.close()
            raise UsageError("the client was called in its own thread, by a log handler perhaps; it cannot wait there")
        future = self.start(work)
        try:
            while True:
                try:
                    return future.result(LIFE_SIGN_SECONDS)
                except TimeoutError:  # the wait's or the work's: when the work is done, its result tells
                    if future.done():
                        return future.result()
                if not self.is_alive:
                    # The work is not cancelled: that would be up to the loop, which says so in the log.
                    if future.done():
                        return future.result()
                    if getcoroutinestate(work) == CORO_CREATED:
                        work.close()
                    raise Closed
        except concurrent.futures.CancelledError:
            raise Closed from None
        except BaseException:
            if self.is_alive:
                future.cancel()
            raise

    def start(self, work: Coroutine[Any, Any, Result]) -> "concurrent.futures.Future[Result]":
        """Begins a coroutine; called from any thread."""
        try:
            return asyncio.run_coroutine_threadsafe(work, self._loop)
        except RuntimeError:  # the loop is closed
            work.close()
            raise Closed from None

    def post(self, callback: Callable[[], None]) -> None:
        """Has the loop call something soon; called from any thread, and from handlers of signals."""
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(callback)

    @property
    def is_ours(self) -> bool:
        """Whether the caller is the loop's thread, which must never wait for itself."""
        return threading.current_thread() is self._thread

    @property
    def is_forked(self) -> bool:
        """Whether this is a child of the process that has the thread: threads do not come along."""
        return os.getpid() != self._pid

    def stop(self) -> None:
        with suppress(RuntimeError):  # stopped already
            self._loop.call_soon_threadsafe(self._stopping.set)
        self._thread.join(_END_SECONDS)
