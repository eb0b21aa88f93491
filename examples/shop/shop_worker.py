"""A worker of the shop: closes orders that nobody paid in time, and packs those that were paid.

Start as many as you like: they share both topics message by message. On SIGTERM a worker takes no more, finishes what
it has in hand, acknowledges it, and ends: a deployment repeats nothing. Run it with: python shop_worker.py
"""

import asyncio
import os

from orders import Store
from shop_app import PAID, TIMEOUTS

import postdate

GROUP = "shop"


async def work() -> None:
    store = Store(os.environ.get("SHOP_DATABASE", "shop.db"))

    async def close(message: postdate.AsyncReceivedMessage) -> None:
        order = message.body.decode()
        if store.end(order, "closed"):
            await asyncio.sleep(0.02)  # tells the customer
            store.note_work(order, "closed", os.getpid())

    async def pack(message: postdate.AsyncReceivedMessage) -> None:
        await asyncio.sleep(0.02)  # tells the warehouse
        store.note_work(message.body.decode(), "packed", os.getpid())

    async with postdate.connect_async() as client:
        print("ready", flush=True)
        await asyncio.gather(
            client.listen(TIMEOUTS, GROUP, close, tasks=8),
            client.listen(PAID, GROUP, pack, tasks=8, retry=["1s", "5s", "1m"], attempts=5),
        )


if __name__ == "__main__":
    asyncio.run(work())
