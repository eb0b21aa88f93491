"""Offsets that consumers commit without waiting for an answer: within pulls, and oneway.

They come with every pull, so they are noted here and written from time to time, as one record per group. A crash may
lose the last of them, and the group reads again from an older one: delivery is at least once. An offset whose client
waits for an answer is written at once.
"""

from collections.abc import Mapping

from postdate.broker.broker import Broker
from postdate.broker.writing import Ticket

Place = tuple[str, int]  # topic, queue id

_ROW_BYTES_MAX = 512  # of an offset in a record: a topic of 255 characters, two numbers, and a share of the rest


class Offsets:
    """The offsets of all groups: in the log, on their way there, or noted until the next `write`."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._rows_max = broker.settings.batch_bytes_max // _ROW_BYTES_MAX
        self._latest: dict[str, dict[Place, int]] = {}  # since the start; the broker lags behind by a flush
        self._noted: dict[str, set[Place]] = {}  # of those, the ones not written
        self._moves: dict[str, dict[Place, int]] = {}  # where an operator has moved a group, until a member learns it
        self._fresh: set[tuple[str, Place]] = set()  # places of which the broker had no offset; may hold too many

    def note(self, group: str, topic: str, queue_id: int, offset: int) -> None:
        """Notes an offset for the next `write`. Raises FlowControl."""
        known = self.get(group, topic, queue_id)
        if known != offset:
            self._admit(group, (topic, queue_id), known)
            self._latest.setdefault(group, {})[topic, queue_id] = offset
            self._noted.setdefault(group, set()).add((topic, queue_id))

    def _admit(self, group: str, place: Place, known: int | None) -> None:
        """Raises FlowControl where an offset for a place without one is one too many. Counts those on their way too."""
        if known is not None:
            return
        view = self._broker.view
        if view.committed_offset_count + len(self._fresh) >= self._broker.limits.offsets_max:
            self._fresh = {
                (name, other)
                for name, other in self._fresh
                if view.committed_offset(name, *other) is None and other in self._latest.get(name, ())
            }
            self._broker.topics.admit_offsets(len(self._fresh) + 1)
        self._fresh.add((group, place))

    def get(self, group: str, topic: str, queue_id: int) -> int | None:
        latest = self._latest.get(group, {}).get((topic, queue_id))
        return latest if latest is not None else self._broker.view.committed_offset(group, topic, queue_id)

    def of(self, group: str) -> dict[Place, int]:
        return self._broker.view.committed_offsets(group) | self._latest.get(group, {})

    def commit(self, group: str, topic: str, queue_id: int, offset: int, at_ms: int) -> Ticket:
        """Writes an offset at once. Raises FlowControl, and what the broker raises."""
        self._admit(group, (topic, queue_id), self.get(group, topic, queue_id))
        ticket = self._broker.commit_offsets(group, [(topic, queue_id, offset)], at_ms)
        self._latest.setdefault(group, {})[topic, queue_id] = offset
        self._noted.get(group, set()).discard((topic, queue_id))
        return ticket

    def move(self, group: str, targets: Mapping[Place, int], at_ms: int, *, is_read: bool) -> Ticket:
        """Writes offsets that an operator has chosen. Where members read these queues (`is_read`), their commits do not
        count until they have learned of the move: they are from before it. Raises DiskFull, LogFailed.
        """
        rows = [(*place, offset) for place, offset in targets.items()]
        for start in range(0, len(rows), self._rows_max):
            ticket = self._broker.commit_offsets(group, rows[start : start + self._rows_max], at_ms)
        self._latest.setdefault(group, {}).update(targets)
        self._noted.get(group, set()).difference_update(targets)
        if is_read:
            self._moves.setdefault(group, {}).update(targets)
        return ticket

    def mark_written(self, group: str, targets: Mapping[Place, int]) -> None:
        """Forgets offsets that are durable: the broker has them now, and moves them itself where the group pops."""
        latest = self._latest.get(group, {})
        for place, offset in targets.items():
            if latest.get(place) == offset and place not in self._noted.get(group, ()):
                del latest[place]

    def is_moving(self, group: str, topic: str, queue_id: int) -> bool:
        """Returns whether a group was moved in a queue and its member there has not learned it yet."""
        return (topic, queue_id) in self._moves.get(group, ())

    def take_move(self, group: str, topic: str, queue_id: int) -> int | None:
        """Returns where a member has to go on, once; None where nobody has moved its group."""
        moves = self._moves.get(group)
        target = moves.pop((topic, queue_id), None) if moves else None
        if moves is not None and not moves:
            del self._moves[group]
        return target

    def forget_moves(self, group: str) -> None:
        """Forgets the moves of a group without members: the next member starts where the group was moved to."""
        self._moves.pop(group, None)

    def write(self, at_ms: int) -> bool:
        """Writes all noted offsets; returns whether there are any. Raises DiskFull, LogFailed; the rest stays noted."""
        if not self._noted:
            return False
        for group in list(self._noted):
            self._write_group(group, at_ms)
        return True

    def _write_group(self, group: str, at_ms: int) -> None:
        latest = self._latest[group]
        rows = [(*place, latest[place]) for place in sorted(self._noted[group])]
        for start in range(0, len(rows), self._rows_max):
            self._broker.commit_offsets(group, rows[start : start + self._rows_max], at_ms)
        del self._noted[group]

    # -- pops: the broker moves the offsets itself ----------------------------------------------------------------

    def begin_pop(self, group: str, topic: str, at_ms: int) -> dict[int, int]:
        """Writes what is noted for a group, before a pop writes where it has moved the group, and returns the offsets
        of a topic's queues that the broker may not know yet. Raises DiskFull, LogFailed.
        """
        latest = self._latest.get(group)
        if not latest:
            return {}
        if group in self._noted:
            self._write_group(group, at_ms)
        return {queue_id: offset for (name, queue_id), offset in latest.items() if name == topic}

    def leave_to_broker(self, group: str, place: Place) -> None:
        """Forgets an offset that a pop has moved."""
        self._latest.get(group, {}).pop(place, None)

    def forget_group(self, group: str) -> None:
        self._latest.pop(group, None)
        self._noted.pop(group, None)
        self._moves.pop(group, None)

    def forget_topic(self, topic: str) -> None:
        for group, latest in self._latest.items():
            for place in [place for place in latest if place[0] == topic]:
                del latest[place]
                self._noted.get(group, set()).discard(place)
        for group, moves in list(self._moves.items()):
            for place in [place for place in moves if place[0] == topic]:
                self.take_move(group, *place)
