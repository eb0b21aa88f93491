"""The programs of examples/, run as a user runs them."""

import configparser
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any
from urllib.error import HTTPError
from urllib.parse import urlencode
from urllib.request import Request, urlopen

import pytest

import postdate
from postdate.spark.executor.broker_client import BrokerClient
from postdate.spark.pending.view import pending
from postdate.spark.session import java
from tests.support.bulk import wait_until
from tests.support.pipeline import World
from tests.support.server import Served, serving
from verify.faults.process import ROOT, Broker, free_port

EXAMPLES = ROOT / "examples"
WAIT_S = 60.0


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


# -- frameworks ---------------------------------------------------------------------------------------------------


@contextmanager
def program(*words: str | Path, ready: str, **variables: str) -> Iterator["subprocess.Popen[str]"]:
    """Runs a program until SIGTERM, from when one of its lines, on stderr, says that it is ready."""
    environ = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"} | variables
    process = subprocess.Popen(
        [sys.executable, *map(str, words)], env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stderr is not None
    try:
        lines = list(iter_until(process.stderr, ready))
        assert ready in lines[-1], "".join(lines)
        rest = threading.Thread(target=process.stderr.read)  # so that it never waits for a reader
        rest.start()
        yield process
    finally:
        process.terminate()
        try:
            process.wait(WAIT_S)
        finally:
            process.kill()
            process.wait()
        rest.join()
        process.stdout.close()
        process.stderr.close()


def iter_until(pipe: IO[str], words: str) -> Iterator[str]:
    for line in pipe:
        yield line
        if words in line:
            return


def ask(method: str, url: str, **form: str) -> tuple[int, dict[str, str]]:
    """Asks a service; returns its code and its answer, a refusal's too."""
    data = urlencode(form).encode() if form else None
    try:
        with urlopen(Request(url, data, method=method), timeout=WAIT_S) as answer:
            return answer.status, json.load(answer)
    except HTTPError as error:
        with error:
            return error.code, json.load(error)


def test_the_fastapi_shop_closes_orders_that_nobody_pays(tmp_path: Path) -> None:
    port = free_port()
    words = ("-m", "uvicorn", "--app-dir", EXAMPLES, "shop_fastapi:app", "--port", str(port))
    with (
        serving(tmp_path / "data") as served,
        program(*words, ready="running on", POSTDATE_ADDR=served.address, ORDER_TIMEOUT="300ms") as process,
    ):
        orders = f"http://127.0.0.1:{port}/orders"
        assert ask("POST", f"{orders}/1") == (201, {"order": "1", "state": "open"})
        assert ask("POST", f"{orders}/1")[0] == 409
        assert ask("POST", f"{orders}/2")[0] == 201
        assert ask("POST", f"{orders}/1/payment") == (200, {"order": "1", "state": "paid"})
        wait_until(lambda: ask("GET", f"{orders}/2")[1]["state"] == "closed")
        assert ask("GET", f"{orders}/1")[1]["state"] == "paid"
        assert ask("POST", f"{orders}/2/payment")[0] == 409
        assert ask("GET", f"{orders}/3")[0] == 404
    assert process.returncode in (0, -signal.SIGTERM)  # newer versions of uvicorn end by the signal that they got


def test_flask_schedules_reminders_that_the_worker_prints(tmp_path: Path) -> None:
    port = free_port()
    words = ("-m", "flask", "--app", EXAMPLES / "reminders_flask.py", "run", "--port", str(port))
    with serving(tmp_path / "data") as served, program(*words, ready="Running on", POSTDATE_ADDR=served.address):
        reminders = f"http://127.0.0.1:{port}/reminders"
        code, never = ask("POST", reminders, text="never", delay="1h")
        assert code == 201
        assert ask("DELETE", f"{reminders}/{never['receipt']}") == (200, {"reminder": "cancelled"})
        assert ask("DELETE", f"{reminders}/{never['receipt']}x")[0] == 400
        assert ask("POST", reminders, text="when?", delay="soon")[0] == 400
        assert ask("POST", reminders, text="stand up", delay="100ms")[0] == 201
        assert worker_prints(served, 1) == ["reminder: stand up"]


def worker_prints(served: Served, count: int) -> list[str]:
    """What worker.py prints until SIGTERM ends it."""
    environ = os.environ | {"PYTHONPATH": str(ROOT), "POSTDATE_ADDR": served.address}
    process = subprocess.Popen(
        [sys.executable, EXAMPLES / "worker.py"], env=environ, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        text=True,
    )  # fmt: skip
    assert process.stdout is not None
    lines = [process.stdout.readline().rstrip() for _ in range(count)]
    process.terminate()
    lines += [line.rstrip() for line in process.stdout]
    process.stdout.close()
    assert process.wait(WAIT_S) in (0, -signal.SIGTERM)
    return lines


def test_the_unit_of_the_worker_is_one_that_systemd_reads() -> None:
    unit = configparser.RawConfigParser(strict=True)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read(EXAMPLES / "worker.service")
    assert unit.sections() == ["Unit", "Service", "Install"]
    assert unit["Service"]["ExecStart"].endswith("/worker.py")
    assert unit["Service"]["KillSignal"] == "SIGTERM"


@pytest.mark.parametrize("crashes", [False, True])
def test_an_outbox_sends_what_was_committed_and_each_order_is_shipped_once(tmp_path: Path, crashes: bool) -> None:
    words = ["--database", str(tmp_path / "shop.db"), *(["--crash"] if crashes else [])]
    with serving(tmp_path / "data") as served:
        done = subprocess.run(
            [sys.executable, str(EXAMPLES / "outbox.py"), served.address, *words],
            env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "order-1 is refused, and its message was never sent"
    assert ("the relay sends 2 messages and dies" in lines) is crashes
    assert sorted(line for line in lines if line.endswith("is shipped")) == [
        "order-1 is shipped",
        "order-2 is shipped",
    ]
    assert sum(line.endswith("came again, and is shipped already") for line in lines) == (2 if crashes else 0)


# -- with Spark ---------------------------------------------------------------------------------------------------


def test_a_campaign_reminds_everybody_at_nine_and_is_postponed(tmp_path: Path, spark: Any) -> None:
    world = World(tmp_path / "data", spark=spark)
    try:
        now = world.clock.now_ms()
        world.served.call(lambda: world.broker.put_topic("reminders", now, read_queue_count=4, write_queue_count=4))
        assert run_beside(world, "campaign.py", world.address, "--day", "2027-07-01") == [
            "2027-06-30 23:00 UTC   20,000  Australia/Sydney",
            "2027-07-01 03:30 UTC   20,000  Asia/Kolkata",
            "2027-07-01 07:00 UTC   20,000  Europe/Berlin",
            "2027-07-01 12:00 UTC   20,000  America/Sao_Paulo",
            "2027-07-01 13:00 UTC   20,000  America/New_York",
            "100,000 reminders are scheduled",
        ]
        job = world.control.find_job("campaign-2027-07-01")
        assert (job.state, job.rows, job.bad) == ("done", 100_000, 0)
        postponed = ["20,000 reminders come 2h later, for 0 it was too late"]
        for _ in range(2):
            assert run_beside(world, "postpone.py", world.served.address, "--zone", "Asia/Kolkata") == postponed
        waiting = pending(spark, world.control).where("properties['zone'] = 'Asia/Kolkata'")
        assert [str(row.due) for row in waiting.select("due").distinct().collect()] == ["2027-07-01 05:30:00"]
        assert waiting.count() == 20_000
    finally:
        world.close()


def run_beside(world: World, name: str, *words: str) -> list[str]:
    """What a program prints while the pipeline is at work."""
    process = subprocess.Popen(
        [sys.executable, str(EXAMPLES / name), *words], env=environ(), stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL, text=True, cwd=world.folder,
    )  # fmt: skip
    until = time.monotonic() + 200
    while process.poll() is None and time.monotonic() < until:
        world.batch()
        time.sleep(0.2)
    process.kill()
    return process.communicate()[0].splitlines()


def environ() -> dict[str, str]:
    found = java.find(os.environ)
    assert not isinstance(found, java.Missing), found.sentence
    return os.environ | {"PYTHONPATH": str(ROOT), "JAVA_HOME": found.home, "PYSPARK_PYTHON": sys.executable}


def test_lateness_is_a_row_for_each_minute(tmp_path: Path) -> None:
    assert shown_by_lateness(tmp_path, [3]) == [3]


@pytest.mark.full
def test_lateness_goes_on_where_it_ended(tmp_path: Path) -> None:
    assert shown_by_lateness(tmp_path, [3, 5]) == [3, 8]


def shown_by_lateness(tmp_path: Path, sent: list[int]) -> list[int]:
    """How many messages each run shows, before which so many are sent."""
    broker = Broker(tmp_path, bulk_port=free_port(), pipeline="none")
    broker.start()
    try:
        control = BrokerClient(broker.route_address)
        wait_until(lambda: bool(control.state().bulk))  # bulk comes up a moment after its broker
        counts = []
        for count in sent:
            send_delayed(control, count)
            counts.append(messages_shown(run_lateness(tmp_path, broker.route_address)))
        return counts
    finally:
        broker.stop()


def send_delayed(control: BrokerClient, count: int) -> None:
    """Returns when all are visible."""
    with postdate.connect(control.address) as client:
        client.send("orders", "not delayed")  # makes the topic
        until = visible(control) + count
        for _ in range(count):
            client.send("orders", "hello", delay="50ms")
        wait_until(lambda: visible(control) >= until)


def visible(control: BrokerClient) -> int:
    return sum(queue.next for queue in control.topic("orders"))


def run_lateness(folder: Path, address: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, EXAMPLES / "lateness.py", "orders", "--table", folder / "late", "--addr", address],
        env=environ(), cwd=folder,
        capture_output=True, text=True, timeout=180, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2_000:]
    return done.stdout.splitlines()


def messages_shown(lines: list[str]) -> int:
    assert lines[0].split() == ["minute,", "UTC", "messages", "mean", "ms", "max", "ms"]
    return sum(int(line.split()[2]) for line in lines[1:])
