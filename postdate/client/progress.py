"""How far a group has come in one queue."""

from collections.abc import Iterable


class Progress:
    """Which messages of a queue are handed out and not yet acknowledged.

    ```
      acknowledged      open      acknowledged    not pulled
      0 1 2 3 4 5 6 |  7     9  |      8        | 10 ...
                       ^ commit_offset            ^ position
    ```

    A group that starts again starts at the offset committed, so that is the smallest one not yet acknowledged: a
    message may come twice, none is left out.
    """

    def __init__(self, start: int) -> None:
        self.position = start  # where to pull next
        self._open: dict[int, None] = {}  # in the order of offsets, because they are pulled in that order

    def pulled(self, offsets: Iterable[int], position: int) -> None:
        """Messages came that want to be acknowledged; those that nobody wants are left out of `offsets`."""
        self._open.update(dict.fromkeys(offsets))
        self.position = position

    def acknowledge(self, offset: int) -> None:
        """May be repeated; an offset that is not open is passed over."""
        self._open.pop(offset, None)

    @property
    def commit_offset(self) -> int:
        return next(iter(self._open), self.position)
