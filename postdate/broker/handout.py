"""The handout: which messages a pop gives, and what others that are not applied yet have promised already.

A pop is decided here, when it is asked for, and written down message by message; the fold gives what the record says.
Between the two, a few milliseconds of disk, what was picked is promised: nobody else may be given it. Nor may a message
whose acknowledgement, change or burial is on its way: what that will do to it, the fold does not know yet.

    ready     messages whose lease is over, in the order in which they came back
    new       those behind the group's offset, which moves on; a pop and a pull share it

In order: while a message of a queue is away, that queue gives nothing, and it gives by offset.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import NamedTuple

from postdate.config import Settings
from postdate.errors import PopsFull
from postdate.message import Host
from postdate.state.fold import Fold
from postdate.state.leases import Key
from postdate.storage.queue import FILTER_ROWS, Queue, tagged

_PASSED_MAX = 10_000  # places remembered, see `_move`: forgetting them costs another look


class PopAsk(NamedTuple):
    """What a consumer asks for."""

    group: str
    topic: str
    queue_ids: Sequence[int]  # where to look, in this order
    count_max: int
    bytes_max: int
    invisible_ms: int
    times_max: int  # given more often than this, a message is a dead letter
    tag_hashes: frozenset[int] | None = None
    from_end: bool = False  # where a group begins that has no offset yet
    in_order: bool = False
    store_host: Host | None = None


class Pick(NamedTuple):
    """A message that will be given."""

    queue_id: int
    number: int
    offset: int
    place: int
    size: int
    visible_at_ms: int
    is_new: bool


class Picked:
    """What a pop will give, with its records."""

    def __init__(self, ask: PopAsk, settings: Settings) -> None:
        self.ask = ask
        self.popped_max = settings.group_popped_max  # of the group
        self.entries_max = settings.wheel_entries_max  # in all: leases and the entries of the wheel
        self.picks: list[Pick] = []
        self.records: list[bytes] = []
        self.lost: list[tuple[int, int]] = []  # (number, offset) of ready messages whose records are gone
        self.next: dict[tuple[int, int], int] = {}  # (queue id, number): where the group goes on
        self._bytes = 0

    @property
    def is_nothing(self) -> bool:
        """Whether there is nothing to write down."""
        return not self.picks and not self.lost

    def has_room(self, size: int) -> bool:
        return len(self.picks) < self.ask.count_max and (not self.picks or self._bytes + size <= self.ask.bytes_max)

    def add(self, pick: Pick, record: bytes) -> None:
        self.picks.append(pick)
        self.records.append(record)
        self._bytes += pick.size

    def keys(self) -> Iterator[Key]:
        for pick in self.picks:
            yield self.ask.group, pick.number, pick.offset


class Handout:
    """Picks for one broker."""

    def __init__(self, fold: Fold) -> None:
        self._fold = fold
        self._promised: dict[Key, int] = {}  # and where its record lies
        self._touched: dict[Key, int] = {}  # acknowledgements, changes and burials on their way
        self._promised_new: dict[str, int] = {}  # by group
        self._next: dict[tuple[str, int], list[int]] = {}  # (group, number): promised offsets, oldest first
        self._passed: dict[tuple[str, int], tuple[int, int]] = {}  # (group, number): from where to where

    # -- promises -----------------------------------------------------------------------------------------------

    def promise(self, picked: Picked) -> None:
        group = picked.ask.group
        self._promised.update(zip(picked.keys(), [pick.place for pick in picked.picks], strict=True))
        self._count_new(group, _new_count(picked))
        for (_, number), offset in picked.next.items():
            self._next.setdefault((group, number), []).append(offset)

    def keep(self, picked: Picked) -> None:
        """The pop is applied: the fold knows it from now on."""
        group = picked.ask.group
        for key in set(picked.keys()):
            del self._promised[key]
        self._count_new(group, -_new_count(picked))
        for _, number in picked.next:
            promised = self._next[group, number]
            del promised[0]
            if not promised:
                del self._next[group, number]

    def promised_places(self) -> set[int]:
        """Where the records lie that will be given, or are changed to come again later: they must stay."""
        leases = self._fold.leases.by_key
        return {*self._promised.values(), *(leases[key].place for key in self._touched if key in leases)}

    def touch(self, keys: Iterable[Key]) -> None:
        """An acknowledgement, change or burial of these messages is written."""
        for key in keys:
            self._touched[key] = self._touched.get(key, 0) + 1

    def leave(self, keys: Iterable[Key]) -> None:
        """It is applied."""
        for key in keys:
            count = self._touched.pop(key) - 1
            if count:
                self._touched[key] = count

    def is_touched(self, key: Key) -> bool:
        return key in self._touched

    def _count_new(self, group: str, change: int) -> None:
        count = self._promised_new.pop(group, 0) + change
        if count:
            self._promised_new[group] = count

    # -- picking ------------------------------------------------------------------------------------------------

    def pick(self, ask: PopAsk, settings: Settings) -> Picked:
        """What can be given now. Raises PopsFull where there is something, and the group has too much already."""
        picked = Picked(ask, settings)
        numbers = self._fold.topics.get(ask.topic).numbers
        queues = [(queue_id, self._fold.queues[numbers[queue_id]]) for queue_id in ask.queue_ids]
        if ask.in_order:
            queues = [(queue_id, queue) for queue_id, queue in queues if not self._is_away(ask.group, queue.number)]
        for queue_id, queue in queues:
            self._pick_ready(picked, queue_id, queue)
        for queue_id, queue in queues:
            if len(picked.picks) < ask.count_max:
                self._pick_new(picked, queue_id, queue)
        return picked

    def _is_away(self, group: str, number: int) -> bool:
        if (group, number) in self._fold.leases.leased:
            return True
        on_their_way = chain(self._promised, self._touched)
        return any(key[0] == group and key[1] == number for key in on_their_way)

    def _pick_ready(self, picked: Picked, queue_id: int, queue: Queue) -> None:
        group, number = picked.ask.group, queue.number
        ready = self._fold.leases.ready.get((group, number), {})
        for offset in sorted(ready) if picked.ask.in_order else ready:
            lease = self._fold.leases.by_key[group, number, offset]
            if not picked.has_room(lease.size):
                return
            if (group, number, offset) in self._promised or (group, number, offset) in self._touched:
                continue
            record = self._fold.read(lease.place, lease.size)
            if record and offset >= queue.first:
                visible_at_ms = int(queue.visible_at_ms(offset, offset + 1)[0])
                pick = Pick(queue_id, number, offset, lease.place, lease.size, visible_at_ms, is_new=False)
                picked.add(pick, record)
            else:
                picked.lost.append((number, offset))

    def _pick_new(self, picked: Picked, queue_id: int, queue: Queue) -> None:
        ask = picked.ask
        begin = self._begin(ask, queue_id, queue)
        start = self._passed_to(ask.group, queue.number, begin)
        room = self._room(picked)
        while start < queue.length:
            if room <= 0:
                self._refuse_if_nothing(picked)
                break
            count_before = len(picked.picks)
            start = self._pick_range(picked, queue_id, queue, start, room)
            if len(picked.picks) > count_before:
                break
        if start > begin:
            self._move(picked, queue_id, queue.number, begin, start)

    def _pick_range(self, picked: Picked, queue_id: int, queue: Queue, start: int, room: int) -> int:
        """Picks what is wanted of the next entries; returns where to go on."""
        ask, leases = picked.ask, self._fold.leases.by_key
        stop = min(start + (FILTER_ROWS if ask.tag_hashes else min(ask.count_max, room)), queue.length)
        entries = queue.entries.read(start, stop)
        visible_at = queue.visible_at_ms(start, stop)
        for index in tagged(entries, ask.tag_hashes) if ask.tag_hashes else range(len(entries)):
            place, size, _ = entries[index].item()
            record = self._fold.read(place, size)
            if not record or (ask.group, queue.number, start + index) in leases:
                continue  # gone; or the group's offset was set back, and it has this one
            if not room or not picked.has_room(size):
                return start + index
            pick = Pick(queue_id, queue.number, start + index, place, size, int(visible_at[index]), is_new=True)
            picked.add(pick, record)
            room -= 1
        return stop

    def _room(self, picked: Picked) -> int:
        group, leases, new_count = picked.ask.group, self._fold.leases, _new_count(picked)
        own = picked.popped_max - leases.counts.get(group, 0) - self._promised_new.get(group, 0)
        promised = sum(self._promised_new.values())
        return min(own, picked.entries_max - self._fold.wheel.count - len(leases.by_key) - promised) - new_count

    def _refuse_if_nothing(self, picked: Picked) -> None:
        if not picked.is_nothing:
            return
        count = self._fold.leases.counts.get(picked.ask.group, 0)
        raise PopsFull(
            f"group {picked.ask.group!r} has {count} messages that it has not acknowledged (group_popped_max: "
            f"{picked.popped_max}), all groups have {len(self._fold.leases.by_key)} (with what is due soon, "
            f"wheel_entries_max: {picked.entries_max})"
        )

    def _move(self, picked: Picked, queue_id: int, number: int, begin: int, end: int) -> None:
        """The group goes on behind what was looked at. What was passed over alone is not worth a record: it is
        remembered here, and looked at again after a restart, or when the group's offset was set to another place.
        """
        if any(pick.number == number for pick in picked.picks):
            picked.next[queue_id, number] = end
            self._passed.pop((picked.ask.group, number), None)
            return
        if len(self._passed) >= _PASSED_MAX:
            self._passed.clear()
        self._passed[picked.ask.group, number] = (begin, end)

    def _passed_to(self, group: str, number: int, begin: int) -> int:
        since, end = self._passed.get((group, number), (begin, begin))
        return end if since == begin else begin

    def _begin(self, ask: PopAsk, queue_id: int, queue: Queue) -> int:
        """The first offset that nobody of the group was given, or promised."""
        promised = self._next.get((ask.group, queue.number))
        offset = promised[-1] if promised else self._fold.groups.offset(ask.group, ask.topic, queue_id)
        if offset is None:
            offset = queue.length if ask.from_end else queue.first
        return max(offset, queue.first)


def _new_count(picked: Picked) -> int:
    return sum(pick.is_new for pick in picked.picks)
