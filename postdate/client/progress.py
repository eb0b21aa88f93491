"""How far a group has come in one queue."""

from collections.abc import Sequence


class Progress:
    """Which messages of a queue were pulled and are not yet acknowledged.

    ```
      acknowledged        open            not pulled
      0 1 2 3 4 5 6 |  7  8  .  .  11  |  12 ...
                       ^ commit_offset    ^ position
    ```

    A group that starts again starts at the offset committed, so that is the smallest one not yet acknowledged: a
    message may come twice, none is left out. Messages of one queue are handed out one at a time, so that they are
    acknowledged in order, and two numbers tell it all. The loop's thread calls `pulled`, the caller's
    `acknowledge`; each step is one assignment, so they need no lock.
    """

    __slots__ = ("_first_open", "_last", "position")

    def __init__(self, start: int) -> None:
        self.position = start  # where to pull next
        self._first_open = start
        self._last = start - 1  # of those that were pulled and are wanted

    def pulled(self, offsets: Sequence[int], position: int) -> None:
        """Notes messages that want to be acknowledged, and where to pull next. `offsets` leaves unwanted ones out."""
        if offsets:
            if self._first_open > self._last:
                self._first_open = offsets[0]
            self._last = offsets[-1]
        self.position = position

    def acknowledge(self, offset: int) -> None:
        """With all before it. May be repeated."""
        if offset >= self._first_open:
            self._first_open = offset + 1

    def is_acknowledged(self, offset: int) -> bool:
        return offset < self._first_open

    @property
    def commit_offset(self) -> int:
        first_open = self._first_open
        return self.position if first_open > self._last else first_open
