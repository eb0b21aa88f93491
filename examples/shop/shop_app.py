"""The shop's web application: place an order, pay it, look at it.

    POST /orders              places an order, to be paid within SHOP_PAY_WITHIN (15m)
    POST /orders/{id}/extend  gives the customer that time again, from now on
    POST /orders/{id}/pay     pays it, if it is not closed
    GET  /orders/{id}         its state (placed, paid or closed), and when it is closed

The order's number is the key of the message that closes it: nobody keeps a receipt.

Run it with: uvicorn shop_app:app, in this folder
"""

import os
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime

from fastapi import FastAPI, HTTPException
from orders import Store

import postdate

TIMEOUTS, PAID = "shop-timeouts", "shop-paid"
PAY_WITHIN = os.environ.get("SHOP_PAY_WITHIN", "15m")


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    """One client for the whole application. uvicorn handles the signals, and the client leaves them alone."""
    async with postdate.connect_async() as client:
        app.state.client, app.state.store = client, Store(os.environ.get("SHOP_DATABASE", "shop.db"))
        yield


app = FastAPI(lifespan=lifespan)


@app.post("/orders", status_code=201)
async def place() -> dict[str, str]:
    """Starts the timer first: a timer without an order does nothing, an order without a timer stays open for ever."""
    order = uuid.uuid4().hex
    await app.state.client.send(TIMEOUTS, order, delay=PAY_WITHIN, key=order)
    app.state.store.place(order)
    return {"id": order, "state": "placed"}


@app.post("/orders/{order}/extend")
async def extend(order: str) -> dict[str, str]:
    """A timer that has run out is not started again: the worker closes the order."""
    if app.state.store.state(order) is None:
        raise HTTPException(404, f"there is no order {order}")
    for timer in await app.state.client.postpone(topic=TIMEOUTS, key=order, delay=PAY_WITHIN):
        if timer.outcome is postdate.Moved.MOVED:
            return {"id": order, "closes_at": shown(timer.due_at_ms)}
    raise HTTPException(409, f"order {order} has no time left: it is {app.state.store.state(order)}")


@app.post("/orders/{order}/pay")
async def pay(order: str) -> dict[str, str]:
    """Has the order packed before the customer is told, then stops the timer, which would find a paid order."""
    if app.state.store.state(order) is None:
        raise HTTPException(404, f"there is no order {order}")
    if not app.state.store.end(order, "paid"):
        raise HTTPException(409, f"order {order} is {app.state.store.state(order)}")
    await app.state.client.send(PAID, order, key=order)
    timers = await app.state.client.cancel(topic=TIMEOUTS, key=order)
    return {"id": order, "state": "paid", "timer": timers[0].outcome.value if timers else "unknown"}


@app.get("/orders/{order}")
async def show(order: str) -> dict[str, str]:
    state = app.state.store.state(order)
    if state is None:
        raise HTTPException(404, f"there is no order {order}")
    answer = {"id": order, "state": state}
    for timer in await app.state.client.find(TIMEOUTS, order):
        if timer.state == "waiting":
            answer["closes_at"] = shown(timer.due_at_ms)
    return answer


def shown(at_ms: int) -> str:
    return datetime.fromtimestamp(at_ms / 1_000, UTC).isoformat(timespec="seconds")
