"""A broker that is killed and started again under a producer and a consumer. Whoever runs this program does it when
"restart please" is printed, and writes a line.
"""

import sys
import threading
import time

from rocketmq.exceptions import RocketMQException
from support import NONE, Clients, Inbox, check, message, now_ms, ok, run, until

TOPIC = "restart"
BEFORE = 100  # acknowledged messages before the restart


class Sending(threading.Thread):
    """Sends one after the other until it is ended: at once, or up to five seconds later, so that some are due while the
    broker is down.
    """

    def __init__(self, clients: Clients) -> None:
        super().__init__()
        self._clients = clients
        self.due_ms: dict[str, int] = {}  # of acknowledged messages, by text
        self.failures = 0
        self.ended = threading.Event()

    def run(self) -> None:
        number = 0
        while not self.ended.wait(0.005):
            number += 1
            self._send(f"kept-{number}", 50 * (number % 100) if number % 2 else 0)

    def _send(self, text: str, delay_ms: int) -> None:
        at_ms = now_ms() + delay_ms
        properties = {"TIMER_DELAY_MS": str(delay_ms)} if delay_ms else NONE
        try:
            self._clients.send(message(TOPIC, text, properties=properties))
        except RocketMQException:
            self.failures += 1
        else:
            self.due_ms[text] = at_ms


def story(route: str) -> None:
    clients, inbox = Clients(route), Inbox()
    clients.consume("restart-group", TOPIC, inbox)
    sending = Sending(clients)
    sending.start()
    restart(sending, inbox)
    sending.ended.set()
    sending.join()
    judge(sending, inbox)


def restart(sending: Sending, inbox: Inbox) -> None:
    """Once is enough: the client waits up to 30 s for the answer to a pull whose connection is gone."""
    until("messages before the restart", lambda: len(sending.due_ms) >= BEFORE and inbox.all)
    print("restart please", flush=True)
    check(sys.stdin.readline(), "nobody restarts the broker")
    up_at, before = time.monotonic(), len(inbox.all)
    until("the consumer reads again", lambda: len(inbox.all) > before + 10)
    ok(f"the consumer reads again {time.monotonic() - up_at:.1f} s after the broker is up")


def judge(sending: Sending, inbox: Inbox) -> None:
    due_ms = sending.due_ms
    until(f"all {len(due_ms)} acknowledged messages", lambda: due_ms.keys() <= inbox.by_text.keys())
    for arrival in inbox.all:
        check(
            arrival.at_ms >= due_ms.get(arrival.text, 0), f"{arrival.text} arrived before it was due, after a restart"
        )
    again = len(inbox.all) - len(inbox.by_text)
    ok(
        f"{len(due_ms)} acknowledged messages arrived, none early, none lost; {again} came twice, "
        f"{sending.failures} sends failed while the broker was down"
    )


run(story)
