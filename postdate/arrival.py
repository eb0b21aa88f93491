"""When a message arrived: the second half of the order (due, arrival), in which messages are fired, staged and stored.

The arrival of a message from the log is its place there. A message that a job brings (imported or postponed) has no
place in the log: its arrival is OWN plus the number of the job, of a part of its rows, and of the row in that part.
Executors import this: it needs the standard library alone.
"""

from typing import Any

NEVER = (1 << 63) - 1  # a due time, or an arrival, after all others
OWN = 1 << 61  # arrivals below are places in the log
OWN_ARRIVAL = 1  # a bit of a row's `flags`: its arrival is OWN or above
NEAR = 1  # a bit of a selected row's `flags`: it was found in the wheel
JOB_SHIFT, _PART_SHIFT = 41, 26
PARTS_MAX, PART_ROWS_MAX = 1 << (JOB_SHIFT - _PART_SHIFT), 1 << _PART_SHIFT


def own_arrival(job: int, part: int = 0, row: int = 0) -> int:
    """Return the arrival of a row that a job brings."""
    return OWN + (job << JOB_SHIFT) + (part << _PART_SHIFT) + row


def job_of(arrival: Any) -> Any:
    """Return the number of the job that brought a row with an arrival of its own; works on a column of them, too."""
    return (arrival - OWN) >> JOB_SHIFT


def came_before(arrival: int, cancel: int, jobs: int) -> bool:
    """Return whether a message came before a cancel, given the cancel's arrival and how many jobs there had been by
    then. A row of kind CANCEL keeps that number where a message keeps the hash of its tag.
    """
    return arrival < cancel if arrival < OWN else bool(job_of(arrival) < jobs)
