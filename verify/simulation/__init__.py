"""Time, disk and crashes in a box: how the core is tested, and how you can test code that uses it.

    from postdate.broker import Broker
    from postdate.clock import ManualClock
    from postdate.testing import VirtualDisk

    clock, disk = ManualClock(), VirtualDisk()
    broker = Broker(disk)                # nothing touches your file system
    clock.pass_ms(3_600_000)             # an hour in no time
    broker.advance(clock.now_ms())

`python -m verify.simulation --seeds 1000` runs random histories of sends, cancels, stages, clock jumps, crashes and
full disks against a small dictionary model; a failing one is shortened and printed with its seed.
"""

from postdate.testing import FaultPoints, Killed, VirtualDisk
from verify.simulation.history import Failure, random_history, run_history, run_seed
from verify.simulation.model import Broken, Model
from verify.simulation.world import Op, World

__all__ = [
    "Broken", "Failure", "FaultPoints", "Killed", "Model", "Op", "VirtualDisk", "World", "random_history",
    "run_history", "run_seed",
]  # fmt: skip
