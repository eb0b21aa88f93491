"""Who is asked what became of a transaction that was left open: one of its producers, whatever protocol it speaks.

Each protocol adds a source, once: a function that says who can be asked about a half right now.

    remoting    producers whose heartbeat names the half's group (PGROUP), on their connections
    gRPC        clients that publish to the half's topic, on their telemetry streams; their PGROUP is the topic's name

A producer is asked by a call that sends the question and waits for nothing: the answer comes as an end like any other.
Who is there, and for how long, is the source's own business; so is whether it may see the half at all.
"""

from collections.abc import Callable, Sequence

from postdate.broker.transactions import OpenHalf

Ask = Callable[[OpenHalf], bool]  # sends the question; False where this producer takes none at the moment
Find = Callable[[OpenHalf], Sequence[Ask]]  # those who can be asked about a half


class Checkers:
    """Asks one producer of a half, in turn."""

    def __init__(self) -> None:
        self._sources: list[Find] = []

    def add(self, source: Find) -> None:
        self._sources.append(source)

    def ask(self, half: OpenHalf) -> bool:
        """Asks one producer. Returns whether somebody was there. The next check of this half asks the next one."""
        asks = [ask for find in self._sources for ask in find(half)]
        first = half.half.number + half.half.check_count
        return any(asks[(first + index) % len(asks)](half) for index in range(len(asks)))
