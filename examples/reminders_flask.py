"""Reminders over HTTP, as a Flask application: flask --app examples/reminders_flask.py run

POST schedules a reminder and answers its receipt; DELETE cancels it by that receipt. POSTDATE_ADDR says where the
broker is. worker.py, in a process of its own, delivers the reminders.

    curl -X POST localhost:5000/reminders -d text="stand up" -d delay=10m
    curl -X DELETE localhost:5000/reminders/RECEIPT
"""

from functools import cache

from flask import Flask, request

import postdate

TOPIC = "reminders"

app = Flask(__name__)


@cache
def client() -> postdate.Client:
    """One client for each process, shared by its threads. Made on first use: a server such as gunicorn imports this
    file and forks, and a client must not be carried over a fork.
    """
    return postdate.connect()


@app.post("/reminders")
def schedule() -> tuple[dict[str, str], int]:
    receipt = client().send(TOPIC, request.form["text"], delay=request.form["delay"])
    return {"receipt": str(receipt)}, 201


@app.delete("/reminders/<receipt>")
def cancel(receipt: str) -> tuple[dict[str, str], int]:
    outcome = client().cancel(receipt)
    return {"reminder": outcome.value}, 200 if outcome is postdate.Cancelled.CANCELLED else 409


@app.errorhandler(postdate.UsageError)
def refuse(error: postdate.UsageError) -> tuple[dict[str, str], int]:
    """A span or a receipt that cannot be read: the client's sentence says what was expected."""
    return {"error": str(error)}, 400


@app.errorhandler(postdate.Unreachable)
def apologise(error: postdate.Unreachable) -> tuple[dict[str, str], int]:
    return {"error": str(error)}, 503
