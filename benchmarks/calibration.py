"""A fixed piece of work that tells how fast a core is at this moment: what others do to it, they do to this too."""

import os
import struct
import time

import numpy as np

TURNS = 10
ROW = struct.Struct("<qqIHB")
KEYS = [b"%032d" % number for number in range(6_000)]
VALUES = np.random.default_rng(1).integers(0, 1 << 40, 5_000)


def loop_s(core: int) -> float:
    """The seconds of CPU that one turn takes on a core: the shortest of some, because noise only adds."""
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        return min(_turn_s() for _ in range(TURNS))
    finally:
        os.sched_setaffinity(0, allowed)


def _turn_s() -> float:
    began = time.thread_time()
    _run_bytecode()
    _run_numpy()
    _run_kernel()
    return time.thread_time() - began


def _run_bytecode() -> None:
    """Fields in and out of rows, slices of bytes, a dictionary: what a send and a pull consist of."""
    found: dict[bytes, int] = {}
    place = 0
    for number, key in enumerate(KEYS):
        row = ROW.pack(number << 20, place, len(key), number & 0xFFFF, 1)
        due, start, size, queue, _ = ROW.unpack(row)
        found[key[16:]] = due + start + queue
        place += size
    total = 0
    for key in KEYS:
        total += found.get(key[16:], 0) & 0xFF
    assert place == 32 * len(KEYS), f"{place} bytes were counted"


def _run_numpy() -> None:
    for _ in range(3):
        order = np.argsort(VALUES, kind="stable")
        np.cumsum(VALUES[order]).tobytes()


def _run_kernel() -> None:
    """Small calls of the system: a pipe that is written and read."""
    reader, writer = os.pipe()
    try:
        for _ in range(1_200):
            os.write(writer, KEYS[0] * 32)
            os.read(reader, 2_048)
    finally:
        os.close(reader)
        os.close(writer)
