"""The C library's heap, in processes that move much: it keeps what is freed, for the next piece.

By default glibc gives each large block back to the system at once, and every page of the next one must be made and
zeroed again: a third of the time that a task takes. Executors import this: the standard library is all it may need.
"""

import ctypes

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # the numbers of glibc's M_TRIM_THRESHOLD and M_MMAP_THRESHOLD
_BYTES = 1 << 30


def keep_freed_memory() -> None:
    """For the rest of this process. Nothing happens where the C library is another one."""
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_option is not None:
        set_option(_TRIM_THRESHOLD, _BYTES)
        set_option(_MMAP_THRESHOLD, _BYTES)
