"""The processes beside the broker: started, watched, started again with growing pauses, and ended in order.

The broker serves without them and never waits for them; they know it as their parent and end when it is gone. Each has
a process group of its own, so that Ctrl-C in a terminal reaches the broker alone, which then ends them, the last one
first. Processes that a part has started in its group end with it. What parts write to stderr goes into the log: lines
of ours at their own level, other lines (a JVM writes many) at debug, and the last of these as warnings when a part
dies.

This module knows nothing of bulk and pipeline but that they are commands; `postdate up` says which.
"""

import asyncio
import contextlib
import logging
import os
import re
import signal
import subprocess
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from typing import IO

from postdate.client.security import without_login
from postdate.clock import Clock
from postdate.config import Limits
from postdate.process import run_on_thread

logger = logging.getLogger("postdate.server")

Addresses = Mapping[str, str]  # "broker", and each part that is up
Command = Callable[[Addresses], Sequence[str]]
Needs = Callable[[], Mapping[str, str] | str]  # environment variables, or a sentence why the part cannot start

_LINE_BYTES_MAX = 4_096  # of a line that a part writes; a longer one is cut
_LAST_LINES = 8  # of a part that dies: enough for the cause, not for a whole stack
_READ_BYTES = 65_536
_NEEDS_S = 1.0  # how long the text on start waits for the needs of parts
_LEFT_S = 1.0  # to read the pipes of a dead part, and for the kernel to end a killed one
_KILL_S = 0.2  # to stop, for a part whose turn comes when all time is used up

_OURS = re.compile(r"[0-9-]{10}T[0-9:.]+Z (debug|info|warning|error|critical) +(.*)")
_FRAME = re.compile(r"\s|Traceback |Caused by: |$")  # a line of a stack, Python's or Java's


class Part:
    """One process, by name. `command` and `needs` are called before every start, `needs` in a thread: it may be slow.

    A part writes one line to its stdout when it is up, a sentence about itself: "bulk listens on 127.0.0.1:9878". Its
    last word is the address, if it has one. A part that comes `after` another waits until that is up. The methods are
    called on one event loop.
    """

    def __init__(self, name: str, command: Command, *, needs: Needs = dict, after: "Part | None" = None) -> None:
        self.name = name
        self.after = after
        self.is_up = asyncio.Event()  # it is up, or was up before its last end
        self.is_examined = asyncio.Event()  # its needs were looked up once
        self._command = command
        self._needs = needs
        self._state = "starts"
        self._resumes_at_ns = 0
        self._process: subprocess.Popen[bytes] | None = None  # until it is reaped: its number stays its own
        self._ended = asyncio.Event()
        self._last_lines: deque[str] = deque(maxlen=_LAST_LINES)
        self._is_stopping = False

    def sentence(self, now_ns: int) -> str:
        """Returns its state in a sentence for operators."""
        if self._resumes_at_ns:
            seconds = max(0, self._resumes_at_ns - now_ns) / 1e9
            return f"starts again in {seconds:.0f} s: {self._state}"
        return self._state

    # -- life -----------------------------------------------------------------------------------------------------

    async def live(self, limits: Limits, clock: Clock, addresses: dict[str, str]) -> None:
        """Keeps the process running until `stop`."""
        pause_ms = limits.pipeline_pause_ms_min
        while True:
            environ = await asyncio.wrap_future(run_on_thread(self._needs))
            self.is_examined.set()
            if isinstance(environ, str):
                if environ != self._state:
                    logger.warning("%s: %s", self.name, environ)
                self._state = environ
                await asyncio.sleep(limits.pipeline_pause_ms_max / 1_000)  # an operator may install it meanwhile
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
            self._state = f"it {ending}" + (f" ({self._last_lines[-1]})" if self._last_lines else "")
            logger.warning("%s %s; it starts again in %g s", self.name, ending, pause_ms / 1_000)
            for line in self._last_lines:
                logger.warning("%s wrote: %s", self.name, line)
            self._resumes_at_ns = clock.elapsed_ns() + pause_ms * 1_000_000
            await asyncio.sleep(pause_ms / 1_000)
            self._resumes_at_ns = 0
            pause_ms = min(2 * pause_ms, limits.pipeline_pause_ms_max)
        self._state = "stopped"

    async def _run(self, environ: Mapping[str, str], addresses: dict[str, str]) -> str:
        """Runs the process once; returns how it ended."""
        self._last_lines.clear()
        try:
            # Not by asyncio: Popen forks without a copy of the broker's page tables, which would delay fires. A process
            # group of its own, as Ctrl-C in a terminal is for us alone, but our session: Linux shares its cores out
            # between sessions first, and niceness would have no effect.
            process = subprocess.Popen(
                self._command(addresses), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                process_group=0, env={**without_login(os.environ), **environ},
            )  # fmt: skip
        except OSError as error:
            return f"cannot start: {error.filename or ''}: {error.strerror}"
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
            await asyncio.wrap_future(run_on_thread(lambda: os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)))
            # Kill its group before reaping it, while its number is certain to be its own.
            os.killpg(process.pid, signal.SIGKILL)
            code = process.wait()
            ending = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
            self._state = f"it {ending}"
            self._process = None
            self._ended.set()
            await asyncio.wait(readers, timeout=_LEFT_S)
        finally:
            for reader in readers:
                reader.cancel()
        return ending

    async def stop(self, seconds: float) -> None:
        """Asks the process to end; kills it with its whole group where it has not ended in time."""
        self._is_stopping = True
        process = self._process
        if process is None:
            return
        os.kill(process.pid, signal.SIGTERM)
        if not await self._wait_until_gone(seconds):
            logger.warning("%s has not stopped within %.1f s and is killed", self.name, seconds)
            os.killpg(process.pid, signal.SIGKILL)
            await self._wait_until_gone(_LEFT_S)

    async def _wait_until_gone(self, seconds: float) -> bool:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._ended.wait(), seconds)
        return self._process is None

    # -- its output -----------------------------------------------------------------------------------------------

    async def _read_stdout(
        self, process: "subprocess.Popen[bytes]", pipe: IO[bytes], addresses: dict[str, str]
    ) -> None:
        line_count = 0
        async for line in _lines(pipe):
            logger.debug("%s: %s", self.name, line)
            line_count += 1
            if line_count == 1:
                addresses[self.name] = line.rpartition(" ")[2]
                self._state = f"{line.removeprefix(self.name).lstrip()} (process {process.pid})"
                self._last_lines.clear()  # lines from the start do not explain a later end
                if self.is_up.is_set():
                    logger.info("%s runs again", self.name)
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
    """All parts: a mapping from name to a sentence about the state at this moment.

    They start in order and stop in reverse order. `others` are sentences about parts that are switched off.
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
        """Starts the parts; returns when their needs are looked up, or after a second, and before they are up."""
        addresses = {"broker": broker_address}
        loop = asyncio.get_running_loop()
        self._tasks = [loop.create_task(part.live(self._limits, self._clock, addresses)) for part in self._parts]
        for task in self._tasks:
            task.add_done_callback(_log_mistake)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_NEEDS_S):
                for part in self._parts:
                    await part.is_examined.wait()

    async def stop(self) -> None:
        """Ends the parts, the last one first, all within little more than `parts_stop_ms`."""
        end_ns = self._clock.elapsed_ns() + self._limits.parts_stop_ms * 1_000_000
        for part, task in reversed(list(zip(self._parts, self._tasks, strict=True))):
            await part.stop(max(_KILL_S, (end_ns - self._clock.elapsed_ns()) / 1e9))
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


def _log_mistake(task: "asyncio.Task[None]") -> None:
    """Logs a mistake of ours that ends the task of a part: nobody else would notice."""
    if not task.cancelled() and task.exception() is not None:
        logger.error("a part is no longer watched", exc_info=task.exception())


async def _lines(pipe: IO[bytes]) -> AsyncIterator[str]:
    """Yields the lines that a process writes, without their ends, until it closes the pipe."""
    reader = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), pipe)
    try:
        rest = b""
        while data := await reader.read(_READ_BYTES):
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                yield _decode_line(line)
            rest = rest[:_LINE_BYTES_MAX]
        if rest:
            yield _decode_line(rest)
    finally:
        transport.close()


def _decode_line(line: bytes) -> str:
    return line[:_LINE_BYTES_MAX].decode(errors="replace").rstrip()
