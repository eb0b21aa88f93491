"""The shop's web application: place an order, pay it, look at it.

    POST /orders            places an order, to be paid within SHOP_PAY_WITHIN (15m)
    POST /orders/{id}/pay   pays it, if it is not closed
    GET  /orders/{id}       its state: placed, paid or closed

Run it with: uvicorn shop_app:app, in this folder
"""

import os
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

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
    timer = await app.state.client.send(TIMEOUTS, order, delay=PAY_WITHIN, key=order)
    app.state.store.place(order, str(timer))
    return {"id": order, "state": "placed"}


@app.post("/orders/{order}/pay")
async def pay(order: str) -> dict[str, str]:
    """Has the order packed before the customer is told, then stops the timer, which would find a paid order."""
    timer = app.state.store.timer(order)
    if timer is None:
        raise HTTPException(404, f"there is no order {order}")
    if not app.state.store.end(order, "paid"):
        raise HTTPException(409, f"order {order} is {app.state.store.state(order)}")
    await app.state.client.send(PAID, order, key=order)
    stopped = await app.state.client.cancel(timer)
    return {"id": order, "state": "paid", "timer": stopped.value}


@app.get("/orders/{order}")
async def show(order: str) -> dict[str, str]:
    state = app.state.store.state(order)
    if state is None:
        raise HTTPException(404, f"there is no order {order}")
    return {"id": order, "state": state}
