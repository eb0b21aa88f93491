"""A listener that fails. The package leaves delay and limit to the broker: level 3, 4, ..., which are 1 s and 2 s here,
and two retries.
"""

import itertools

from rocketmq.exceptions import RocketMQException
from support import Clients, Inbox, check, message, ok, run, until


def story(route: str) -> None:
    clients = Clients(route)
    again(clients)
    dead(clients)


def again(clients: Clients) -> None:
    inbox = Inbox()
    unique_key = clients.send(message("again", "hard work", tag="paid", key="order-7"))
    clients.consume("again-group", "again", inbox, "paid", is_done=lambda arrival: arrival.times == 2)
    arrivals = inbox.wait(3, "attempts")
    check([arrival.times for arrival in arrivals] == [0, 1, 2], f"attempts say {arrivals}")
    for arrival in arrivals:
        expected = ("hard work", "again", "paid", "order-7", unique_key)
        check((arrival.text, *arrival[1:4], arrival.unique_key) == expected, f"a retry is {arrival}")
    gaps = [later.at_ms - earlier.at_ms for earlier, later in itertools.pairwise(arrivals)]
    check(gaps[0] >= 1_000 and gaps[1] >= 2_000, f"retries came after {gaps} ms, expected 1 and 2 s")
    ok(f"a message that failed twice came again after {gaps[0]} and {gaps[1]} ms")


def dead(clients: Clients) -> None:
    inbox, letters = Inbox(), Inbox()
    unique_key = clients.send(message("dead", "hopeless", key="order-8"))
    clients.consume("dead-group", "dead", inbox, is_done=lambda _: False)
    until("three attempts", lambda: len(inbox.all) == 3)
    until("a dead letter", lambda: has_letter(clients, letters))
    (letter,) = letters.all
    expected = ("hopeless", "order-8", unique_key)
    check((letter.text, letter.key, letter.unique_key) == expected, f"the dead letter is {letter}")
    check(len(inbox.all) == 3, f"{len(inbox.all)} attempts with two retries allowed")
    ok("after two retries a message is a dead letter, pulled from %DLQ%dead-group")


def has_letter(clients: Clients, letters: Inbox) -> bool:
    """There is no such topic before the first letter."""
    try:
        clients.pull("dead-group-reader", "%DLQ%dead-group", letters)
    except RocketMQException:
        return False
    return bool(letters.all)


run(story)
