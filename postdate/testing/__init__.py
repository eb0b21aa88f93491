"""Doubles for tests of your own code: a clock moved by hand, a disk in memory, and a broker on both.

docs/testing.md shows how to use them.
"""

from postdate.clock import ManualClock
from postdate.testing.broker import InProcessBroker
from postdate.testing.disk import VirtualDisk
from postdate.testing.faultpoints import FaultPoints, Killed
from postdate.testing.process import BrokerProcess

__all__ = ["BrokerProcess", "FaultPoints", "InProcessBroker", "Killed", "ManualClock", "VirtualDisk"]
