"""What applying batches has changed for those who wait: returned by `settle`, `advance` and `flush` of the broker."""

from collections.abc import Set
from typing import NamedTuple


class Changes(NamedTuple):
    """Everything that has changed since changes were last returned, by this call or by others that wait for the disk
    themselves, as making a topic does.
    """

    batch_count: int  # batches that were applied
    grown_queues: Set[int]  # numbers of the queues that got messages
    ready_again: Set[tuple[str, int]]  # groups and numbers of queues where leases have ended
