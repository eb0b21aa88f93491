"""The shop of examples/shop under load, while a worker is replaced, and the broker is restarted and killed."""

import os
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from urllib.error import URLError

import pytest

import postdate
from postdate.testing import BrokerProcess
from tests.docs.test_examples import ask
from tests.support.bulk import wait_until
from verify.faults.process import ROOT, free_port

SHOP = ROOT / "examples" / "shop"
ORDERS = 240
CUSTOMERS = 12  # at once
WAIT_S = 120.0


class Shop:
    """The shop's processes, in one folder."""

    def __init__(self, folder: Path, broker: BrokerProcess, pay_within: str) -> None:
        self.folder = folder
        self._environment = os.environ | {
            "PYTHONPATH": str(ROOT), "POSTDATE_ADDR": broker.address, "SHOP_DATABASE": str(folder / "shop.db"),
            "SHOP_PAY_WITHIN": pay_within,
        }  # fmt: skip
        self._processes: list[subprocess.Popen[bytes]] = []

    def start(self, *words: str) -> "subprocess.Popen[bytes]":
        with (self.folder / f"{len(self._processes)}.log").open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, *words], cwd=SHOP, env=self._environment, stdout=log, stderr=log
            )
        self._processes.append(process)
        return process

    def start_worker(self) -> "subprocess.Popen[bytes]":
        return self.start("shop_worker.py")

    def start_app(self) -> str:
        """Starts the web application; returns its address when it answers."""
        port = free_port()
        process = self.start("-m", "uvicorn", "shop_app:app", "--port", str(port))
        address = f"http://127.0.0.1:{port}"

        def answers() -> bool:
            assert process.poll() is None, self.logs()
            try:
                return ask("GET", f"{address}/orders/none")[0] == 404
            except URLError:
                return False

        wait_until(answers, WAIT_S)
        return address

    def stop(self) -> None:
        """Ends all that still run, as a deployment does."""
        running = [process for process in self._processes if process.poll() is None]
        for process in running:
            process.terminate()
        for process in running:
            assert process.wait(WAIT_S) in (0, -signal.SIGTERM), self.logs()  # uvicorn ends by the signal itself

    def logs(self) -> str:
        return "\n".join(path.read_text() for path in sorted(self.folder.glob("*.log")))

    def kill(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()


@contextmanager
def opened(folder: Path, broker: BrokerProcess, pay_within: str = "2s") -> Iterator[Shop]:
    shop = Shop(folder, broker, pay_within)
    try:
        yield shop
    finally:
        shop.kill()


def buy(address: str, disturb: Callable[[int], None]) -> tuple[set[str], set[str]]:
    """Places orders, pays every second one and gives some others more time; returns those that were paid, and those
    that were not. `disturb` gets the number of orders so far.
    """
    paid: set[str] = set()
    unpaid: set[str] = set()
    lock = threading.Lock()

    def order(number: int) -> None:
        code, placed = ask("POST", f"{address}/orders")
        assert code == 201, placed
        name = placed["id"]
        is_paid = False
        if number % 2:
            code, answer = ask("POST", f"{address}/orders/{name}/pay")
            assert code in (200, 409), answer  # 409 where the broker was away for so long that the order was closed
            is_paid = code == 200
        elif number % 8 == 0:
            code, answer = ask("POST", f"{address}/orders/{name}/extend")
            assert code in (200, 409), answer
            code, answer = ask("GET", f"{address}/orders/{name}")
            assert code == 200, answer
            assert answer["state"] in ("placed", "closed"), answer
        with lock:
            (paid if is_paid else unpaid).add(name)
            count = len(paid) + len(unpaid)
        disturb(count)

    with ThreadPoolExecutor(CUSTOMERS) as customers:
        for done in [customers.submit(order, number) for number in range(ORDERS)]:
            done.result()
    return paid, unpaid


def test_a_deployment_and_a_broker_that_restarts_lose_nothing_and_repeat_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(SHOP)
    from orders import Store

    with BrokerProcess(tmp_path) as broker, opened(tmp_path, broker) as shop:
        first = shop.start_worker()
        shop.start_worker()
        address = shop.start_app()

        def deploy() -> None:
            shop.start_worker()
            first.terminate()
            assert first.wait(WAIT_S) == 0, shop.logs()

        def restart() -> None:
            broker.close()
            broker.start()

        def crash() -> None:
            broker.kill()
            broker.start()

        left = {ORDERS // 4: deploy, ORDERS // 2: restart, ORDERS * 3 // 4: crash}
        paid, unpaid = buy(address, lambda count: left.pop(count, lambda: None)())
        assert not left, "all of it happened"
        assert len(paid) > ORDERS // 4, "most payments came in time"

        store = Store(tmp_path / "shop.db")
        wanted = dict.fromkeys(paid, "paid") | dict.fromkeys(unpaid, "closed")
        work = Counter([(order, "packed") for order in paid] + [(order, "closed") for order in unpaid])
        wait_until(lambda: store.states() == wanted and len(store.work()) >= len(work), WAIT_S)
        shop.stop()
        # What was finished and not acknowledged would come again: nothing is left, in no member's hand either.
        with postdate.connect(broker.address) as client:
            for topic in ("shop-timeouts", "shop-paid"):
                assert [each.body for each in client.consume(topic, "shop", idle="500ms")] == []
        assert Counter(store.work()) == work, "each once"
        store.close()


def test_an_order_is_put_off_and_paid_by_its_number_alone(tmp_path: Path) -> None:
    with BrokerProcess(tmp_path) as broker, opened(tmp_path, broker, pay_within="15m") as shop:
        address = shop.start_app()
        _, placed = ask("POST", f"{address}/orders")
        order = f"{address}/orders/{placed['id']}"
        _, before = ask("GET", order)
        wait_until(lambda: ask("POST", f"{order}/extend")[1]["closes_at"] > before["closes_at"], WAIT_S)
        assert ask("GET", order)[1]["closes_at"] > before["closes_at"]
        assert ask("POST", f"{order}/pay") == (200, {"id": placed["id"], "state": "paid", "timer": "cancelled"})
        assert ask("GET", order) == (200, {"id": placed["id"], "state": "paid"})
        assert ask("POST", f"{order}/extend")[0] == 409
        assert ask("POST", f"{address}/orders/none/extend")[0] == 404
