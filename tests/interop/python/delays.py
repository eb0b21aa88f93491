"""Every way to ask for a delay; each arrival is compared with the time of sending. Levels are 1 s, 2 s, 1 s, ..."""

from typing import Any

from support import Clients, Inbox, check, message, now_ms, ok, run

TOPIC = "delays"


def story(route: str) -> None:
    clients, inbox = Clients(route), Inbox()
    clients.consume("delays-group", TOPIC, inbox)
    clients.send(message(TOPIC, "hello"))
    inbox.wait(1, "first messages")  # from here on the consumer is no longer what messages wait for

    due_ms = send_all(clients)
    for name, value in (("TIMER_DELAY_MS", "soon"), ("TIMER_DELAY_SEC", str(20 * 365 * 86_400))):
        refusal = clients.refused(message(TOPIC, "never", properties={name: value}))
        ok(f"{name} = {value} is refused; what the package says of it: {refusal.splitlines()[0]}")
    inbox.wait(1 + len(due_ms), "delayed messages")
    judge(inbox, due_ms)


def send_all(clients: Clients) -> dict[str, int]:
    """Returns when each is due at the earliest, by its text."""
    due_ms: dict[str, int] = {}

    def send(text: str, at_ms: int, **how: Any) -> None:
        due_ms[text] = at_ms
        clients.send(message(TOPIC, text, **how))

    send("level 1", now_ms() + 1_000, level=1)
    send("level 2", now_ms() + 2_000, level=2)
    send("TIMER_DELAY_SEC = 2", now_ms() + 2_000, properties={"TIMER_DELAY_SEC": "2"})
    send("TIMER_DELAY_MS = 1234", now_ms() + 1_234, properties={"TIMER_DELAY_MS": "1234"})
    for name, delay_ms in (("TIMER_DELIVER_MS", 2_567), ("__STARTDELIVERTIME", 1_765), ("TIMER_DELIVER_MS", -5_000)):
        at_ms = now_ms() + delay_ms
        send(f"{name} in {delay_ms} ms", at_ms, properties={name: str(at_ms)})
    first_ms = now_ms() + 2_000
    for n in range(200):
        send(f"spread-{n}", first_ms + 10 * n, properties={"TIMER_DELIVER_MS": str(first_ms + 10 * n)})
    return due_ms


def judge(inbox: Inbox, due_ms: dict[str, int]) -> None:
    late_ms = {text: arrival.at_ms - due_ms[text] for text, arrival in inbox.by_text.items() if text in due_ms}
    check(late_ms.keys() == due_ms.keys(), f"{due_ms.keys() - late_ms.keys()} did not arrive")
    for text, late in late_ms.items():
        check(late >= 0, f"{text} arrived {-late} ms before it was due")
        if not text.startswith("spread-"):
            ok(f"{text}: arrived {late} ms after due")
    spread = [late for text, late in late_ms.items() if text.startswith("spread-")]
    ok(f"{len(spread)} instants, 10 ms apart: none early, the latest by {max(spread)} ms")


run(story)
