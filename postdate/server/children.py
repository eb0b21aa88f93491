"""The processes beside the broker: started, watched, started again with growing pauses, and ended in order.

The broker serves without them and never waits for them; they know it as their parent and end when it is gone. Each has
a session of its own, so that Ctrl-C in a terminal reaches the broker alone, which then ends them one after another, the
last one first. Whatever a process has started in its group ends with it. What they write to stderr goes into the log:
lines of ours at their own level, anything else (a JVM says a lot) at debug, and the last of it as a warning when a
process dies.

This module knows nothing of bulk and pipeline but that they are commands; `postdate up` says which.
"""

import asyncio
import contextlib
import logging
import os
import re
import signal
import subprocess
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import IO, TypeVar

from postdate.clock import Clock
from postdate.config import Limits

logger = logging.getLogger("postdate.server")

Result = TypeVar("Result")
Addresses = Mapping[str, str]  # "broker", and each part that is up
Command = Callable[[Addresses], Sequence[str]]
Needs = Callable[[], Mapping[str, str] | str]  # environment variables, or the sentence why it cannot be started

_LINE_BYTES_MAX = 4_096  # of what a process says; a longer line is cut
_LAST_LINES = 8  # of a process that dies: enough for what went wrong, not for a whole stack
_READ_BYTES = 65_536
_NEEDS_S = 1.0  # the text on start waits for so long to say whether all is there
_LEFT_S = 1.0  # for what a dead process has left in its pipes, and for the kernel to end one that was killed
_KILL_S = 0.2  # to stop, for a part whose turn comes when all time has been used up

_OURS = re.compile(r"[0-9-]{10}T[0-9:.]+Z (debug|info|warning|error|critical) +(.*)")
_FRAME = re.compile(r"\s|Traceback |Caused by: |$")  # of a stack, Python's or Java's: what it says stands beside it


class Part:
    """One process, by name. `command` is asked before every start, and so is `needs`, in a thread: it may be slow.

    A part writes one line to its stdout when it is up, a sentence about itself: "bulk listens on 127.0.0.1:9878". Its
    last word is the address, where it has one. A part that comes `after` another waits for that. The methods are called
    on one event loop.
    """

    def __init__(self, name: str, command: Command, *, needs: Needs = dict, after: "Part | None" = None) -> None:
        self.name = name
        self.after = after
        self.is_up = asyncio.Event()  # or was, before it was started again
        self.is_examined = asyncio.Event()  # whether what it needs is there is known
        self._command = command
        self._needs = needs
        self._state = "starts"
        self._resumes_at_ns = 0
        self._process: subprocess.Popen[bytes] | None = None  # until it is reaped: its number is its own
        self._ended = asyncio.Event()
        self._last_lines: deque[str] = deque(maxlen=_LAST_LINES)
        self._is_stopping = False

    def sentence(self, now_ns: int) -> str:
        """How it is, in people's words."""
        if self._resumes_at_ns:
            seconds = max(0, self._resumes_at_ns - now_ns) / 1e9
            return f"starts again in {seconds:.0f} s: {self._state}"
        return self._state

    # -- life -----------------------------------------------------------------------------------------------------

    async def live(self, limits: Limits, clock: Clock, addresses: dict[str, str]) -> None:
        """Keeps the process running until `stop`."""
        pause_ms = limits.pipeline_pause_ms_min
        while True:
            environ = await _aside(self._needs)
            self.is_examined.set()
            if isinstance(environ, str):
                self._say(environ)
                await asyncio.sleep(limits.pipeline_pause_ms_max / 1_000)  # somebody may install it meanwhile
                continue
            if self.after is not None:
                self._state = f"waits for {self.after.name}"
                await self.after.is_up.wait()
            began_ns = clock.elapsed_ns()
            ending = await self._run(environ, addresses)
            if self._is_stopping:
                break
            if clock.elapsed_ns() - began_ns >= limits.pipeline_steady_ms * 1_000_000:
                pause_ms = limits.pipeline_pause_ms_min
            self._tell_end(ending, pause_ms)
            self._resumes_at_ns = clock.elapsed_ns() + pause_ms * 1_000_000
            await asyncio.sleep(pause_ms / 1_000)
            self._resumes_at_ns = 0
            pause_ms = min(2 * pause_ms, limits.pipeline_pause_ms_max)
        self._state = "stopped"

    def _say(self, sentence: str) -> None:
        if sentence != self._state:
            logger.warning("%s: %s", self.name, sentence)
        self._state = sentence

    def _tell_end(self, ending: str, pause_ms: int) -> None:
        last = f" ({self._last_lines[-1]})" if self._last_lines else ""
        self._state = f"it {ending}{last}"
        logger.warning("%s %s; it is started again in %g s", self.name, ending, pause_ms / 1_000)
        for line in self._last_lines:
            logger.warning("%s said: %s", self.name, line)

    async def _run(self, environ: Mapping[str, str], addresses: dict[str, str]) -> str:
        """Runs the process once; returns how it ended."""
        self._last_lines.clear()
        try:
            # Not asyncio's way: Popen forks without a copy of the broker's page tables, which would delay fires. A
            # group of its own, as Ctrl-C in a terminal is for us alone, but our session: Linux shares its cores out
            # between sessions first, and niceness would say nothing.
            process = subprocess.Popen(
                self._command(addresses), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                process_group=0, env={**os.environ, **environ},
            )  # fmt: skip
        except OSError as error:
            return f"cannot be started: {error.filename or ''}: {error.strerror}"
        self._process = process
        self._ended.clear()
        self._state = f"starts (process {process.pid})"
        logger.debug("%s is process %d", self.name, process.pid)
        assert process.stdout is not None
        assert process.stderr is not None
        readers = [
            asyncio.ensure_future(self._read_stdout(process, process.stdout, addresses)),
            asyncio.ensure_future(self._read_stderr(process.stderr)),
        ]
        try:
            await _aside(lambda: os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT))
            # Before it is reaped, so that its number is certain to be its own: what it started goes with it.
            os.killpg(process.pid, signal.SIGKILL)
            code = process.wait()
            ending = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
            self._state = f"starts again: it {ending}"
            self._process = None
            self._ended.set()
            await asyncio.wait(readers, timeout=_LEFT_S)
        finally:
            for reader in readers:
                reader.cancel()
        return ending

    async def stop(self, seconds: float) -> None:
        """Asks the process to end, and kills it with all that it started where it has not after so many seconds."""
        self._is_stopping = True
        process = self._process
        if process is None:
            return
        os.kill(process.pid, signal.SIGTERM)
        if not await self._is_gone(seconds):
            logger.warning("%s has not stopped within %.1f s and is killed", self.name, seconds)
            os.killpg(process.pid, signal.SIGKILL)
            await self._is_gone(_LEFT_S)

    async def _is_gone(self, seconds: float) -> bool:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._ended.wait(), seconds)
        return self._process is None

    # -- what it says ---------------------------------------------------------------------------------------------

    async def _read_stdout(
        self, process: "subprocess.Popen[bytes]", pipe: IO[bytes], addresses: dict[str, str]
    ) -> None:
        said = 0
        async for line in _lines(pipe):
            logger.debug("%s: %s", self.name, line)
            said += 1
            if said == 1:
                addresses[self.name] = line.rpartition(" ")[2]
                self._state = f"{line.removeprefix(self.name).lstrip()} (process {process.pid})"
                self._last_lines.clear()  # what it said on its way tells nothing about an end that comes later
                self.is_up.set()

    async def _read_stderr(self, pipe: IO[bytes]) -> None:
        async for line in _lines(pipe):
            ours = _OURS.fullmatch(line)
            if ours:
                logger.log(logging.getLevelName(ours[1].upper()), "%s: %s", self.name, ours[2])
                continue
            logger.debug("%s: %s", self.name, line)
            if not _FRAME.match(line):
                self._last_lines.append(line)


class Parts(Mapping[str, str]):
    """All parts, and how each of them is: a mapping from name to sentence, as it is when it is asked for.

    They are started in their order and stopped against it. `others` are sentences about what is not there.
    """

    def __init__(self, limits: Limits, clock: Clock, parts: Sequence[Part], others: Mapping[str, str]) -> None:
        self._limits = limits
        self._clock = clock
        self._parts = tuple(parts)
        self._others = dict(others)
        self._tasks: list[asyncio.Task[None]] = []

    def __getitem__(self, name: str) -> str:
        for part in self._parts:
            if part.name == name:
                return part.sentence(self._clock.elapsed_ns())
        return self._others[name]

    def __iter__(self) -> Iterator[str]:
        yield from (part.name for part in self._parts)
        yield from self._others

    def __len__(self) -> int:
        return len(self._parts) + len(self._others)

    async def start(self, broker_address: str) -> None:
        """Returns when it is known whether what they need is there, or after a second: not when they run."""
        addresses = {"broker": broker_address}
        loop = asyncio.get_running_loop()
        self._tasks = [loop.create_task(part.live(self._limits, self._clock, addresses)) for part in self._parts]
        for task in self._tasks:
            task.add_done_callback(_tell_mistake)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_NEEDS_S):
                for part in self._parts:
                    await part.is_examined.wait()

    async def stop(self) -> None:
        """Ends them, the last one first, all within `parts_stop_ms` and a little."""
        end_ns = self._clock.elapsed_ns() + self._limits.parts_stop_ms * 1_000_000
        for part, task in reversed(list(zip(self._parts, self._tasks, strict=True))):
            await part.stop(max(_KILL_S, (end_ns - self._clock.elapsed_ns()) / 1e9))
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


def _tell_mistake(task: "asyncio.Task[None]") -> None:
    """Of ours: nobody else would notice that a part is not looked after any more."""
    if not task.cancelled() and task.exception() is not None:
        logger.error("a part is not looked after any more", exc_info=task.exception())


async def _lines(pipe: IO[bytes]) -> AsyncIterator[str]:
    """The lines that a process writes, without their ends, until it has closed the pipe."""
    reader = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), pipe)
    try:
        rest = b""
        while data := await reader.read(_READ_BYTES):
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                yield _text(line)
            rest = rest[:_LINE_BYTES_MAX]
        if rest:
            yield _text(rest)
    finally:
        transport.close()


def _text(line: bytes) -> str:
    return line[:_LINE_BYTES_MAX].decode(errors="replace").rstrip()


async def _aside(work: Callable[[], Result]) -> Result:
    """The result of something that blocks. Its thread keeps nobody from ending, as those of asyncio would."""
    done: Future[Result] = Future()
    done.set_running_or_notify_cancel()  # from now on it gets a result, even if nobody waits for that any more

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=run, name="part", daemon=True).start()
    return await asyncio.wrap_future(done)
