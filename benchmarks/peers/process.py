"""A turn as a process: started, listened to, and ended with all that it started."""

import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.peers import packages
from benchmarks.process import tree

ROOT = Path(__file__).parent.parent.parent
STOP_S = 60.0
TICK_S = 1.0
PR_SET_CHILD_SUBREAPER = 36  # of linux/prctl.h


class NotEnded(Exception):
    """A turn took too long, or failed; the sentence says which."""


def follow(
    arguments: Sequence[str], limit_s: float, errors: Path, heard: Callable[[list[Any]], None], tick: Callable[[], None]
) -> None:
    """Runs a turn to its end; `heard` gets every line. Raises NotEnded. Whatever happens, nothing of it runs on."""
    before = set(tree(os.getpid()))
    with errors.open("wb") as output:
        started = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.peers.turn", *arguments], stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=output, env=packages.environment(), cwd=ROOT,
            process_group=0,  # Ctrl-C reaches only the command, which then ends what it started
        )  # fmt: skip
    try:
        _listen(started, time.monotonic() + limit_s, heard, tick)
        if code := started.wait(STOP_S):
            raise NotEnded(f"failed with code {code}: {errors.read_text(errors='replace')[-600:].strip()}")
    except TimeoutError as late:
        raise NotEnded(f"not finished within {limit_s:g} s") from late
    finally:
        _end(started, before)


def _listen(
    started: "subprocess.Popen[bytes]", until: float, heard: Callable[[list[Any]], None], tick: Callable[[], None]
) -> None:
    assert started.stdout is not None
    rest = b""
    while True:
        tick()
        if time.monotonic() > until:
            raise TimeoutError
        if not select.select([started.stdout], [], [], TICK_S)[0]:
            continue
        data = os.read(started.stdout.fileno(), 65_536)
        if not data:
            return
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            heard(json.loads(line))


def _end(started: "subprocess.Popen[bytes]", before: set[int]) -> None:
    """Asks it to stop its system. What is left then of all that it started is killed, each by its id."""
    started.terminate()
    try:
        started.wait(STOP_S)
    except subprocess.TimeoutExpired:
        started.kill()
        started.wait()
    assert started.stdout is not None
    started.stdout.close()
    for pid in set(tree(os.getpid())) - before:
        _kill(pid)


def adopt_orphans() -> None:
    """From now on a process whose parent ends is a child of this one: a server that hides in the background, too."""
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl")


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    except (ProcessLookupError, ChildProcessError):  # it has ended, or is for its own parent to wait for
        return
