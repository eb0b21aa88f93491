"""Log lines that peers cause: no peer may fill our disk with them.

`write` logs up to complaints_max lines a second and counts the others. `write_seldom` is for what a peer may repeat all
day: the first line comes at once, then a line each minute that says how often it was.
"""

import logging
from collections.abc import Hashable

logger = logging.getLogger("postdate.server")

_SELDOM_SWEEPS = 60  # of a second each
_KEYS_MAX = 1_000  # things that repeat at the same time; the others share one line


class Lines:
    """The lines of one server. Its methods are called on the loop's thread."""

    def __init__(self, per_second_max: int) -> None:
        self._per_second_max = per_second_max
        self._count = 0  # since the last sweep
        self._level_left_out = 0  # the highest of those that were too many
        self._sweeps = 0
        self._repeated: dict[Hashable, tuple[int, str]] = {}  # by thing: how often since its last line, and the line

    def write(self, level: int, text: str, *details: object) -> None:
        """Logs a line, unless there were too many within this second."""
        self._count += 1
        if self._count <= self._per_second_max:
            logger.log(level, text, *details)
        else:
            self._level_left_out = max(self._level_left_out, level)

    def write_seldom(self, thing: Hashable, line: str) -> None:
        """Logs a warning about a thing that may repeat: at once, then with a count each minute until it ends."""
        if thing not in self._repeated and len(self._repeated) >= _KEYS_MAX:
            thing = None
        if thing in self._repeated:
            self._repeated[thing] = (self._repeated[thing][0] + 1, line)
        else:
            self._repeated[thing] = (0, line)
            self.write(logging.WARNING, "%s", line)

    def sweep(self) -> None:
        """Says what was left out. Called once a second."""
        left_out = self._count - self._per_second_max
        if left_out > 0:
            sentence = "complaints_max: %d more lines like these within a second are left out"
            logger.log(self._level_left_out, sentence, left_out)
        self._count = self._level_left_out = 0
        self._sweeps += 1
        if self._sweeps % _SELDOM_SWEEPS == 0:
            repeated, self._repeated = self._repeated, {}
            for thing, (count, line) in repeated.items():
                if count:
                    self._repeated[thing] = (0, line)
                    self.write(logging.WARNING, "%d times more within a minute, the last time: %s", count, line)
