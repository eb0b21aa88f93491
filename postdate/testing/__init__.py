"""Doubles for tests: a clock that is moved by hand and a disk in memory. docs/testing.md shows how to use them."""

from postdate.clock import ManualClock
from postdate.testing.disk import Killed, VirtualDisk

__all__ = ["Killed", "ManualClock", "VirtualDisk"]
