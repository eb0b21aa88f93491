"""Quotas: how many messages wait for each second of due time, by topic. A table of the fold, kept only where there is a
limit per topic and second.

A message is counted when it begins to wait, and counts until its second has passed, cancelled or not.
"""

import heapq


class Quotas:
    """Counts of messages by second of due time and topic."""

    def __init__(self) -> None:
        self._counts: dict[int, dict[str, int]] = {}  # by second, by topic
        self._seconds: list[int] = []  # a heap of the seconds

    def add(self, due: int, topic: str) -> None:
        second = due // 1_000
        if second not in self._counts:
            self._counts[second] = {}
            heapq.heappush(self._seconds, second)
        self._counts[second][topic] = self._counts[second].get(topic, 0) + 1

    def count(self, second: int, topic: str) -> int:
        return self._counts.get(second, {}).get(topic, 0)

    def forget_passed(self, at_ms: int) -> None:
        while self._seconds and self._seconds[0] < at_ms // 1_000:
            del self._counts[heapq.heappop(self._seconds)]

    def state(self) -> list[tuple[int, dict[str, int]]]:
        return [(second, dict(counts)) for second, counts in self._counts.items()]

    def load(self, state: list[tuple[int, dict[str, int]]]) -> None:
        self._counts = dict(state)
        self._seconds = sorted(self._counts)
