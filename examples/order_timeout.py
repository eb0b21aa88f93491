"""An order must be paid within half an hour, or it is closed: python examples/order_timeout.py [ADDRESS]

When an order is placed, a message to close it is sent with a delay. Who pays in time has it cancelled, by the receipt
that was stored with the order. Whoever closes orders hears only of those that nobody paid. No job scans a database for
orders that are too old. The timeout is 2 s here, so that the example ends soon.
"""

import argparse
from dataclasses import dataclass

import postdate

TOPIC, GROUP = "order-timeouts", "order-closer"


@dataclass
class Order:
    name: str
    timer: str  # the receipt of the message that would close it
    state: str = "open"


class Shop:
    """Its orders would be rows of a database."""

    def __init__(self, client: postdate.Client, timeout: str) -> None:
        self._client = client
        self._timeout = timeout
        self.orders: dict[str, Order] = {}

    def place(self, name: str) -> None:
        receipt = self._client.send(TOPIC, name, delay=self._timeout, key=name)
        self.orders[name] = Order(name, str(receipt))
        print(f"{name} is placed, to be paid within {self._timeout}")

    def pay(self, name: str) -> None:
        """The answer decides: a message that is cancelled will never come, one that was delivered came first."""
        order = self.orders[name]
        if self._client.cancel(order.timer) is postdate.Cancelled.CANCELLED:
            order.state = "paid"
        print(f"{name} is {order.state}")

    def close_unpaid(self) -> None:
        """Runs for ever in a real shop: here, until no order is open."""
        for message in self._client.consume(TOPIC, GROUP):
            order = self.orders.get(message.body.decode())
            if order is not None and order.state == "open":  # a message may come twice, or from an earlier run
                order.state = "closed"
                print(f"{order.name} is closed: nobody paid")
            if all(each.state != "open" for each in self.orders.values()):
                message.acknowledge()
                return


def main() -> None:
    parser = argparse.ArgumentParser(description="Orders that must be paid in time.")
    parser.add_argument("address", nargs="?", default="127.0.0.1:9876", help="of the broker (default: %(default)s)")
    parser.add_argument("--timeout", default="2s", help="30m in a real shop (default: %(default)s)")
    arguments = parser.parse_args()
    with postdate.connect(arguments.address) as client:
        shop = Shop(client, arguments.timeout)
        shop.place("order-1")
        shop.place("order-2")
        shop.pay("order-1")
        shop.close_unpaid()
        shop.pay("order-2")  # too late


if __name__ == "__main__":
    main()
