"""python -m soak --minutes N [--seed S] [--kill-every SECONDS]: see scripts/soak."""

import argparse
import logging
import random
import signal
import sys
import tempfile
from pathlib import Path
from types import FrameType

from soak.run import Soak

FAULTS_SHOWN = 50


def say(text: str) -> None:
    print(text, flush=True)


def main() -> int:
    """Returns 0 when every promise was kept, 1 otherwise."""
    parser = argparse.ArgumentParser(
        prog="scripts/soak", description="Mixed work on a broker that is killed on and on."
    )
    parser.add_argument(
        "--minutes", type=float, default=10.0, help="default 10; Ctrl-C ends it earlier, with a verdict"
    )
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 20), help="default: by chance")
    parser.add_argument("--kill-every", type=float, default=30.0, metavar="SECONDS", help="default 30; 0 is never")
    options = parser.parse_args()
    logging.getLogger("postdate").setLevel(logging.CRITICAL)  # that connections are lost is what this is about
    with tempfile.TemporaryDirectory(prefix="postdate-soak-") as folder:
        soak = Soak(Path(folder), options.seed, options.minutes * 60, options.kill_every, say)

        def stop(_number: int, _frame: FrameType | None) -> None:
            signal.signal(signal.SIGINT, signal.default_int_handler)  # a second one ends it at once
            soak.stop()

        signal.signal(signal.SIGINT, stop)
        say(f"soak of {options.minutes:g} minutes, a kill every {options.kill_every:g} s, seed {options.seed}")
        result = soak.run()
    for fault in result.faults[:FAULTS_SHOWN]:
        say(fault)
    if len(result.faults) > FAULTS_SHOWN:
        say(f"... and {len(result.faults) - FAULTS_SHOWN} more")
    say(f"{result.summary}; {len(result.faults)} faults (seed {options.seed})")
    return int(bool(result.faults))


if __name__ == "__main__":
    sys.exit(main())
