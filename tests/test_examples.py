"""The programs of examples/, run as a user runs them."""

import os
import re
import subprocess
import sys
import time
from pathlib import Path

from carrying import World
from process import ROOT
from serving import serving

from postdate.pipeline import java

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


def test_a_campaign_reminds_everybody_at_nine(tmp_path: Path) -> None:
    found = java.find(os.environ)
    assert not isinstance(found, java.Missing), found.sentence
    world = World(tmp_path / "data")
    environ = os.environ | {"PYTHONPATH": str(ROOT), "JAVA_HOME": found.home, "PYSPARK_PYTHON": sys.executable}
    try:
        now = world.clock.now_ms()
        world.served.call(lambda: world.broker.put_topic("reminders", now, read_queue_count=4, write_queue_count=4))
        asked = [sys.executable, str(EXAMPLES / "campaign.py"), str(world.bulk.address), "--day", "2027-07-01"]
        process = subprocess.Popen(
            asked, env=environ, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, cwd=tmp_path
        )
        until = time.monotonic() + 200
        while process.poll() is None and time.monotonic() < until:
            world.batch()
            time.sleep(0.2)
        assert process.communicate()[0].splitlines() == [
            "2027-06-30 23:00 UTC   20,000  Australia/Sydney",
            "2027-07-01 03:30 UTC   20,000  Asia/Kolkata",
            "2027-07-01 07:00 UTC   20,000  Europe/Berlin",
            "2027-07-01 12:00 UTC   20,000  America/Sao_Paulo",
            "2027-07-01 13:00 UTC   20,000  America/New_York",
            "100,000 reminders are scheduled",
        ]
        job = world.gate.job("campaign-2027-07-01")
        assert (job["state"], job["rows"], job["bad"]) == ("done", 100_000, 0)
    finally:
        world.close()
