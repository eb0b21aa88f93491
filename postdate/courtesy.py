"""Courtesy: processes that work in bulk beside a broker let it go first.

Niceness tells how a core is shared over time; it does not tell who waits when a message falls due. Linux lets whoever
runs end his slice, some milliseconds, unless the one who wakes has the shorter slice (from 6.12 on). So bulk work asks
for long slices: it loses nothing, and whoever fires has the core at once.
"""

import ctypes
import os
import platform

_SLICE_NS = 100_000_000  # the longest that Linux gives
_SCHED_SETATTR = {"x86_64": 314, "aarch64": 274}  # the number of the system call


class _Attributes(ctypes.Structure):
    """struct sched_attr of Linux, as it was at first."""

    _fields_ = (
        ("size", ctypes.c_uint32), ("policy", ctypes.c_uint32), ("flags", ctypes.c_uint64), ("nice", ctypes.c_int32),
        ("priority", ctypes.c_uint32), ("runtime", ctypes.c_uint64), ("deadline", ctypes.c_uint64),
        ("period", ctypes.c_uint64),
    )  # fmt: skip


def let_others_go_first(niceness: int) -> None:
    """For this process and all that it starts from now on."""
    nice = os.nice(niceness)
    call = _SCHED_SETATTR.get(platform.machine())
    if call is not None and platform.system() == "Linux":
        wanted = _Attributes(size=ctypes.sizeof(_Attributes), nice=nice, runtime=_SLICE_NS)
        ctypes.CDLL(None).syscall(call, 0, ctypes.byref(wanted), 0)  # where it is not known, niceness must do
