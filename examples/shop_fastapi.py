"""Orders that must be paid in time, as a FastAPI service: uvicorn --app-dir examples shop_fastapi:app

The lifespan of the service holds one asyncio client and one worker. Placing an order sends a message that is due when
the time to pay is over; paying cancels it; the worker closes the orders whose message comes. POSTDATE_ADDR says where
the broker is, ORDER_TIMEOUT how long a customer has (30m).

    curl -X POST localhost:8000/orders/17
    curl -X POST localhost:8000/orders/17/payment
    curl localhost:8000/orders/17

Orders are kept in memory, so run one process of it. With a database, any number of processes share the work: the answer
of the cancel decides who was first, the customer or the clock.
"""

import asyncio
import logging
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from fastapi import FastAPI, HTTPException, Request

import postdate

TOPIC, GROUP = "order-timeouts", "order-closer"
TIMEOUT = os.environ.get("ORDER_TIMEOUT", "30m")

log = logging.getLogger("shop")


@dataclass
class Order:
    timer: str  # the receipt of the message that closes it
    state: str = "open"


orders: dict[str, Order] = {}


async def close_order(message: postdate.AsyncReceivedMessage) -> None:
    """Handles a timeout. A message may come twice, or after a restart: closing an order twice does no harm."""
    order = orders.get(message.body.decode())
    if order is not None and order.state == "open":
        order.state = "closed"


def report_end(worker: "asyncio.Task[None]") -> None:
    """A worker that ends by itself is a failure that somebody must see: a task keeps its exception to itself."""
    if not worker.cancelled() and worker.exception() is not None:
        log.critical("no order is closed any more", exc_info=worker.exception())


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    async with postdate.connect_async() as client:
        app.state.client = client
        worker = asyncio.create_task(client.listen(TOPIC, GROUP, close_order))
        worker.add_done_callback(report_end)
        yield
        worker.cancel()
        await asyncio.wait([worker])


app = FastAPI(lifespan=lifespan)


@app.post("/orders/{name}", status_code=201)
async def place(name: str, request: Request) -> dict[str, str]:
    client: postdate.AsyncClient = request.app.state.client
    if name in orders:
        raise HTTPException(409, "there is an order of that name")
    receipt = await client.send(TOPIC, name, delay=TIMEOUT, key=name)
    orders[name] = Order(str(receipt))
    return {"order": name, "state": "open"}


@app.post("/orders/{name}/payment")
async def pay(name: str, request: Request) -> dict[str, str]:
    """The answer decides: a timer that is cancelled never rings, one that was delivered rang first."""
    client: postdate.AsyncClient = request.app.state.client
    order = find(name)
    if order.state == "open" and await client.cancel(order.timer) is postdate.Cancelled.CANCELLED:
        order.state = "paid"
    if order.state != "paid":
        raise HTTPException(409, "too late: the order is closed")
    return {"order": name, "state": order.state}


@app.get("/orders/{name}")
async def show(name: str) -> dict[str, str]:
    return {"order": name, "state": find(name).state}


def find(name: str) -> Order:
    order = orders.get(name)
    if order is None:
        raise HTTPException(404, "there is no such order")
    return order
