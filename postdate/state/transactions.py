"""Transactions: the halves that are open, and how the last ones ended. A table of the fold.

A half is a message that its producer has sent and not decided about. It is in no queue and waits for no due. It is
known by the place of its record in the log, and the log keeps that record as long as the half is open.

    record         what it does to a half
    half           opens it: its producer is to be asked at the instant that the row names
    commit         ends it, and is a message from then on; counts only if the half is open
    transaction    "roll_back": ends it. "check": its producer was asked. "give_up": nobody is asked any more

A half that was given up stays open: an operator, or its producer, may still end it. Whoever ends one a second time
learns how it ended: that is remembered of the last halves.
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from postdate.arrival import NEVER
from postdate.message import Ended
from postdate.state.references import References

ENDED_REMEMBERED_MAX = 10_000  # how many ended halves are known by how they ended: about 1 MB of RAM
CHECK, GIVE_UP, ROLL_BACK = "check", "give_up", "roll_back"  # calls of a record
# The parts of a snapshot, as they are without any; a snapshot of an earlier version has none of them.
NO_TRANSACTIONS: dict[str, Any] = {"halves": [], "halves_opened": 0, "halves_ended": []}
_ALREADY = {True: Ended.ALREADY_COMMITTED, False: Ended.ALREADY_ROLLED_BACK}


class Half(NamedTuple):
    """A half that is open. What else is known of it stands in its record."""

    offset: int  # of its record in the log
    size: int
    queue: int  # number of the queue that its message is for
    number: int  # how many halves came before it, ever
    unique_hash: int
    stored_at_ms: int
    check_at_ms: int  # when its producer is to be asked next; NEVER where the half was given up
    check_count: int = 0  # how often its producer was asked
    given_up_at_ms: int = 0  # 0: it was not


class Transactions:
    """Halves by the offset of their record."""

    def __init__(self, references: References) -> None:
        self._references = references
        self.halves: dict[int, Half] = {}
        self.opened_count = 0  # ever
        self.bytes = 0  # of the records of open halves
        self.given_up_count = 0  # of the open ones
        self._ended: dict[int, bool] = {}  # by offset, the last ones: whether the half was committed
        self._by_key: dict[int, list[int]] = {}  # by hash of the unique key, offsets of open halves

    # -- what records do ----------------------------------------------------------------------------------------

    def open(self, half: Half) -> None:
        self.opened_count += 1
        self._add(half)
        self._references.hold(half.offset)

    def end(self, offset: int, *, is_committed: bool) -> Ended:
        """Ends a half, if it is open."""
        if offset not in self.halves:
            return self.how_ended(offset)
        self._remove(offset)
        self._ended[offset] = is_committed
        if len(self._ended) > ENDED_REMEMBERED_MAX:
            del self._ended[next(iter(self._ended))]
        return Ended.COMMITTED if is_committed else Ended.ROLLED_BACK

    def note_checked(self, offsets: Iterable[int], again_at_ms: int) -> None:
        """The producers of some halves were asked; those that are open are asked again at an instant."""
        for half in self._open_ones(offsets):
            count = half.check_count + 1
            self.halves[half.offset] = half._replace(check_count=count, check_at_ms=again_at_ms)

    def give_up(self, offsets: Iterable[int], at_ms: int) -> None:
        for half in self._open_ones(offsets):
            self.given_up_count += not half.given_up_at_ms
            self.halves[half.offset] = half._replace(check_at_ms=NEVER, given_up_at_ms=at_ms)

    def forget_queues(self, numbers: Iterable[int]) -> None:
        """The topic of some queues is deleted, and its halves with it."""
        gone = set(numbers)
        for half in [half for half in self.halves.values() if half.queue in gone]:
            self._remove(half.offset)

    # -- questions ----------------------------------------------------------------------------------------------

    def how_ended(self, offset: int) -> Ended:
        """Returns how a half that is not open has ended."""
        is_committed = self._ended.get(offset)
        return Ended.UNKNOWN if is_committed is None else _ALREADY[is_committed]

    def find(self, unique_hash: int) -> list[Half]:
        """Returns the open halves whose unique key has a hash; it is only a hint."""
        return [self.halves[offset] for offset in self._by_key.get(unique_hash, ())]

    # -- inside -------------------------------------------------------------------------------------------------

    def _open_ones(self, offsets: Iterable[int]) -> list[Half]:
        return [self.halves[offset] for offset in offsets if offset in self.halves]

    def _add(self, half: Half) -> None:
        self.halves[half.offset] = half
        self.bytes += half.size
        self.given_up_count += half.given_up_at_ms > 0
        self._by_key.setdefault(half.unique_hash, []).append(half.offset)

    def _remove(self, offset: int) -> None:
        half = self.halves.pop(offset)
        self.bytes -= half.size
        self.given_up_count -= half.given_up_at_ms > 0
        same = self._by_key[half.unique_hash]
        same.remove(offset)
        if not same:
            del self._by_key[half.unique_hash]
        self._references.forget(offset)

    # -- snapshots ----------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        return {
            "halves": list(self.halves.values()),
            "halves_opened": self.opened_count,
            "halves_ended": list(self._ended.items()),
        }

    def load(self, halves: Iterable[Sequence[int]], opened_count: int, ended: Iterable[tuple[int, bool]]) -> None:
        """Takes the state of a snapshot; the references have one of their own."""
        self.opened_count, self._ended = opened_count, dict(ended)
        for values in halves:
            self._add(Half(*values))
