"""The settings that hold now, and the limits: the one way in which parts of the broker learn them."""

from postdate.config import Limits, Settings


class CurrentSettings:
    """Every part is given this object and reads `now` when it needs a setting, so that a change by an operator holds
    from the next call on. Nobody keeps what it has read. Limits do not change while the broker is open.
    """

    __slots__ = ("limits", "now")

    def __init__(self, now: Settings, limits: Limits) -> None:
        self.now, self.limits = now, limits
