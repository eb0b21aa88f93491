"""Doubles for tests of your own code: a clock moved by hand, a disk in memory, and a broker on both.

docs/testing.md shows how to use them.
"""

from postdate.clock import ManualClock
from postdate.testing.broker import InProcessBroker
from postdate.testing.disk import Killed, VirtualDisk

__all__ = ["InProcessBroker", "Killed", "ManualClock", "VirtualDisk"]
