"""Offsets that consumers commit without waiting for an answer: within pulls, and oneway.

They come with every pull, so they are collected and written as one record per group from time to time. A crash may
lose the last of them, and the group reads again from an older one: delivery is at least once. An offset whose client
waits for an answer is written at once.
"""

from postdate.broker import Broker, Ticket

Place = tuple[str, int]  # topic, queue id


class Offsets:
    """What is committed, written or not yet."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._noted: dict[str, dict[Place, int]] = {}

    @property
    def is_empty(self) -> bool:
        return not self._noted

    def note(self, group: str, topic: str, queue_id: int, offset: int) -> None:
        """Keeps an offset until `write`."""
        if self._broker.fold.groups.offset(group, topic, queue_id) != offset:
            self._noted.setdefault(group, {})[topic, queue_id] = offset
        elif group in self._noted:
            self._noted[group].pop((topic, queue_id), None)

    def get(self, group: str, topic: str, queue_id: int) -> int | None:
        noted = self._noted.get(group, {}).get((topic, queue_id))
        return noted if noted is not None else self._broker.fold.groups.offset(group, topic, queue_id)

    def of(self, group: str) -> dict[Place, int]:
        """All that a group has committed."""
        return self._broker.fold.groups.offsets(group) | self._noted.get(group, {})

    def commit(self, group: str, topic: str, queue_id: int, offset: int, at_ms: int) -> Ticket:
        """Writes an offset at once."""
        ticket = self._broker.commit_offsets(group, [(topic, queue_id, offset)], at_ms)
        self._noted.get(group, {}).pop((topic, queue_id), None)
        return ticket

    def write(self, at_ms: int) -> None:
        """Writes everything that was noted. Raises DiskFull, LogFailed; then what is left stays noted."""
        for group, noted in list(self._noted.items()):
            rows = [(*place, offset) for place, offset in noted.items() if self._is_there(*place)]
            if rows:
                self._broker.commit_offsets(group, rows, at_ms)
            del self._noted[group]

    def _is_there(self, topic: str, queue_id: int) -> bool:
        """A topic may have been deleted, or made anew with fewer queues, since its offset was noted."""
        known = self._broker.fold.topics.by_name.get(topic)
        return known is not None and queue_id < len(known.numbers)

    def forget_group(self, group: str) -> None:
        self._noted.pop(group, None)
