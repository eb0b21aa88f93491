"""The programs of examples/, run as a user runs them."""

import os
import re
import subprocess
import sys
from pathlib import Path

from serving import serving

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"


def test_every_example_is_listed() -> None:
    listed = re.findall(r"^\| \[(\w+\.py)\]\(\1\) \| .+ \|$", (EXAMPLES / "README.md").read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(path.name for path in EXAMPLES.glob("*.py"))


def test_an_order_that_is_paid_is_not_closed(tmp_path: Path) -> None:
    with serving(tmp_path / "data") as served:
        done = subprocess.run(
            [sys.executable, str(EXAMPLES / "order_timeout.py"), served.address, "--timeout", "1s"],
            env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "order-1 is placed, to be paid within 1s",
        "order-2 is placed, to be paid within 1s",
        "order-1 is paid",
        "order-2 is closed: nobody paid",
        "order-2 is closed",
    ]
