"""Queues that orderly consumers hold for themselves. A lock that is not renewed expires; nothing of it is on disk."""

from typing import NamedTuple

Queue = tuple[str, int]  # topic, queue id


class _Lock(NamedTuple):
    client_id: str
    until_ns: int


class Locks:
    """By group: who holds which queue, and until when."""

    def __init__(self, lock_ns: int) -> None:
        self._lock_ns = lock_ns
        self._locks: dict[str, dict[Queue, _Lock]] = {}

    def lock(self, group: str, client_id: str, queues: list[Queue], now_ns: int) -> list[Queue]:
        """Takes or renews what is free or the client's own; returns what it holds now of these."""
        held = self._locks.setdefault(group, {})
        taken = []
        for queue in queues:
            lock = held.get(queue)
            if lock is None or lock.client_id == client_id or lock.until_ns <= now_ns:
                held[queue] = _Lock(client_id, now_ns + self._lock_ns)
                taken.append(queue)
        return taken

    def unlock(self, group: str, client_id: str, queues: list[Queue]) -> None:
        held = self._locks.get(group, {})
        for queue in queues:
            lock = held.get(queue)
            if lock is not None and lock.client_id == client_id:
                del held[queue]
        if not held:
            self._locks.pop(group, None)

    def expire(self, now_ns: int) -> None:
        """Forgets what has expired, so that the table does not grow."""
        for group in list(self._locks):
            held = {queue: lock for queue, lock in self._locks[group].items() if lock.until_ns > now_ns}
            if held:
                self._locks[group] = held
            else:
                del self._locks[group]
