"""Runs the core on a virtual clock and disk, through random histories with crashes, against a small model.

    from postdate.broker import Broker
    from postdate.clock import ManualClock
    from postdate.testing import VirtualDisk

    clock, disk = ManualClock(), VirtualDisk()
    broker = Broker(disk)                # nothing touches your file system
    clock.pass_ms(3_600_000)             # an hour in no time
    broker.advance(clock.now_ms())

`python -m verify.simulation --seeds 1000` runs random histories of sends, cancels, stages, clock jumps, crashes and
full disks. It shortens a history that fails, and prints it with its seed.
"""

from postdate.testing import FaultPoints, Killed, VirtualDisk
from verify.simulation.history import Failure, random_history, run_history, run_seed
from verify.simulation.model import Broken, Model
from verify.simulation.world import Op, World

__all__ = [
    "Broken", "Failure", "FaultPoints", "Killed", "Model", "Op", "VirtualDisk", "World", "random_history",
    "run_history", "run_seed",
]  # fmt: skip
