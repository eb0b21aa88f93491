"""Kills at fault points: what a test of crashes listens with."""

from postdate import faultpoint


class Killed(BaseException):
    """The process dies at a fault point. Not an Exception, so that no code of the broker handles it."""


class FaultPoints:
    """Remembers the fault points that are reached inside its `with` block, and raises Killed at one of them if asked.

        with FaultPoints(kill_at=("log.flush", 2)) as points:    # at the third time
            ...
        with FaultPoints(kill_after=10) as points:               # at the eleventh point, whatever its name
            ...

    A kill happens once. The block may be entered again.
    """

    def __init__(self, kill_at: tuple[str, int] | None = None, kill_after: int | None = None) -> None:
        self.reached: list[str] = []  # in order, over all blocks
        self.kill_at = kill_at  # (point, how many more times it is passed first)
        self.kill_after = kill_after  # how many more points of any name are passed first
        self._before: list[faultpoint.Listener | None] = []

    def __enter__(self) -> "FaultPoints":
        self._before.append(faultpoint.listen(self.note))
        return self

    def __exit__(self, *_error: object) -> None:
        faultpoint.listen(self._before.pop())

    def note(self, point: str) -> None:
        """The listener. Raises Killed where a kill is due."""
        self.reached.append(point)
        if self.kill_after is not None:
            self.kill_after -= 1
            if self.kill_after < 0:
                self.kill_after = None
                raise Killed(point)
        if self.kill_at is not None and self.kill_at[0] == point:
            self.kill_at = (point, self.kill_at[1] - 1)
            if self.kill_at[1] < 0:
                self.kill_at = None
                raise Killed(point)

    def disarm(self) -> None:
        """Nothing kills any more; a process that has ended reaches no more points."""
        self.kill_at = self.kill_after = None
