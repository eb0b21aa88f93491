"""Which member of a group reads which queue."""

from collections.abc import Collection, Sequence
from typing import TypeVar

Queue = TypeVar("Queue")


def allocate_by_circle(client_id: str, client_ids: Collection[str], queues: Sequence[Queue]) -> Sequence[Queue]:
    """Returns the queues of one member as `allocate` does, but in turn: of 3 members each gets every third queue."""
    if client_id not in client_ids:
        return ()
    return queues[sorted(client_ids).index(client_id) :: len(client_ids)]


def allocate(client_id: str, client_ids: Collection[str], queues: Sequence[Queue]) -> Sequence[Queue]:
    """Returns the queues of one member: an even, contiguous share of the sorted queues, in the order of the sorted
    members.

    Every member computes this for itself, Java clients included, so it must be RocketMQ's "averagely" to the letter:
    with 8 queues and 3 members the shares are 3, 3 and 2. With more members than queues, the last members get none. A
    client that is not a member gets nothing. `queues` must be sorted.
    """
    if client_id not in client_ids:
        return ()
    index, member_count = sorted(client_ids).index(client_id), len(client_ids)
    share, left_over = divmod(len(queues), member_count)
    start = index * share + min(index, left_over)
    return queues[start : start + share + (index < left_over)]
