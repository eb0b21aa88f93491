"""Records on their way to a consumer, many at once: what `record.deliver` fills in one by one, filled in by columns.

```
  body       | record 0     | record 1   | record 2      | ...
  positions  0              240          470
```

A pull of a thousand messages takes a tenth of the time of thirty pulls of 32 this way. It is for records that are all
alike, which nearly all are: sent to the queue that gives them, by a producer with an IPv4 address.

This is a file of its own because it needs numpy: the executors of the pipeline load record.py, and have none.
"""

from typing import Any

import numpy as np

from postdate.message import Host
from postdate.storage import record as records

MANY = 64  # from this many records on it is faster than one by one

_OFFSETS = np.dtype([("queue_offset", ">i8"), ("offset", ">i8")])
_ADDRESS_BYTES = 4
_STORED = np.dtype([("stored_at_ms", ">i8"), ("address", f"V{_ADDRESS_BYTES}"), ("port", ">i4")])
_QUEUE_ID = np.dtype(">i4")


def deliver(
    body: bytearray, positions: np.ndarray, queue_id: int, queue_offset: int, places: np.ndarray,
    visible_at_ms: np.ndarray, store_host: Host,
) -> bool:  # fmt: skip
    """Fills in what is known when messages are delivered, as `record.deliver`; the queue offsets count up from the one
    given. False, and nothing is changed, where a record needs more than that.
    """
    if len(store_host.address) != _ADDRESS_BYTES or not _are_usual(body, positions, queue_id):
        return False
    offsets = np.empty(len(positions), _OFFSETS)
    offsets["queue_offset"] = np.arange(queue_offset, queue_offset + len(positions))
    offsets["offset"] = places
    _at_any_byte(body, offsets.dtype)[positions + records.QUEUE_OFFSET_POSITION] = _as_bytes(offsets)
    stored = np.empty(len(positions), _STORED)
    stored["stored_at_ms"] = visible_at_ms
    stored["address"], stored["port"] = np.void(store_host.address), store_host.port
    _at_any_byte(body, stored.dtype)[positions + records.STORED_AT_POSITION] = _as_bytes(stored)
    return True


def _are_usual(body: bytearray, positions: np.ndarray, queue_id: int) -> bool:
    """Whether all are of this queue, and have hosts with IPv4 addresses."""
    host_bits = np.frombuffer(body, np.uint8)[positions + records.HOST_BITS_POSITION]
    if (host_bits & records.HOSTS_V6).any():
        return False
    found = _at_any_byte(body, _QUEUE_ID)[positions + records.QUEUE_ID.start].view(_QUEUE_ID)
    return bool((found == queue_id).all())


def _at_any_byte(body: bytearray, dtype: "np.dtype[Any]") -> np.ndarray:
    """The bytes as overlapping items, one from each byte on: numpy copies an item at a time, not a byte."""
    return np.ndarray((len(body) - dtype.itemsize + 1,), f"V{dtype.itemsize}", body, strides=(1,))


def _as_bytes(rows: np.ndarray) -> np.ndarray:
    return rows.view(f"V{rows.dtype.itemsize}")
