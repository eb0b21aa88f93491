"""Bursts: how many messages wait for each second of due time, by topic. A limit per topic and second asks for that.

A message is counted when it begins to wait, and counts until its second has passed, cancelled or not. A table of the
fold, kept only where there is such a limit.
"""

import heapq


class Bursts:
    """Of one fold."""

    def __init__(self) -> None:
        self._counts: dict[int, dict[str, int]] = {}  # by second, by topic
        self._heap: list[int] = []  # of the seconds

    def add(self, due: int, topic: str) -> None:
        second = due // 1_000
        if second not in self._counts:
            self._counts[second] = {}
            heapq.heappush(self._heap, second)
        self._counts[second][topic] = self._counts[second].get(topic, 0) + 1

    def count(self, second: int, topic: str) -> int:
        return self._counts.get(second, {}).get(topic, 0)

    def forget_passed(self, at_ms: int) -> None:
        while self._heap and self._heap[0] < at_ms // 1_000:
            del self._counts[heapq.heappop(self._heap)]

    def state(self) -> list[tuple[int, dict[str, int]]]:
        return [(second, dict(counts)) for second, counts in self._counts.items()]

    def load(self, state: list[tuple[int, dict[str, int]]]) -> None:
        self._counts = dict(state)
        self._heap = sorted(self._counts)
