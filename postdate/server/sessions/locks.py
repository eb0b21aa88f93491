"""Queues that orderly consumers hold for themselves. A lock expires unless its client renews it; none is on disk."""

from typing import NamedTuple

from postdate.errors import FlowControl

Queue = tuple[str, int]  # topic, queue id


class _Lock(NamedTuple):
    client_id: str
    until_ns: int


class Locks:
    """Which client holds which queue, and until when, by group."""

    def __init__(self, lock_ns: int, locks_max: int) -> None:
        self._lock_ns, self._locks_max = lock_ns, locks_max
        self._locks: dict[str, dict[Queue, _Lock]] = {}

    @property
    def count(self) -> int:
        return sum(map(len, self._locks.values()))

    def lock(self, group: str, client_id: str, queues: list[Queue], now_ns: int) -> list[Queue]:
        """Locks free queues, renews the client's own, and returns both. Raises FlowControl where that is too many."""
        held = self._locks.get(group, {})
        free = [
            queue
            for queue in queues
            if (lock := held.get(queue)) is None or lock.client_id == client_id or lock.until_ns <= now_ns
        ]
        fresh_count = sum(queue not in held for queue in free)
        if fresh_count and self.count + fresh_count > self._locks_max:
            raise FlowControl(f"locks_max: {self.count} queues are locked, the limit is {self._locks_max}; try later")
        if free:
            self._locks[group] = held | dict.fromkeys(free, _Lock(client_id, now_ns + self._lock_ns))
        return free

    def unlock(self, group: str, client_id: str, queues: list[Queue]) -> None:
        held = self._locks.get(group, {})
        for queue in queues:
            lock = held.get(queue)
            if lock is not None and lock.client_id == client_id:
                del held[queue]
        if not held:
            self._locks.pop(group, None)

    def expire(self, now_ns: int) -> None:
        """Removes expired locks, so that the table does not grow."""
        for group in list(self._locks):
            held = {queue: lock for queue, lock in self._locks[group].items() if lock.until_ns > now_ns}
            if held:
                self._locks[group] = held
            else:
                del self._locks[group]
