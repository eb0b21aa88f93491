"""What is not delayed: bodies, keys, tags, oneway, a batch, order, pulling by oneself."""

from support import Clients, Inbox, check, message, ok, run


def story(route: str) -> None:
    clients = Clients(route)
    plain(clients)
    tagged(clients)
    oneway_and_batch(clients)
    in_order(clients)
    pulled(clients)


def plain(clients: Clients) -> None:
    inbox = Inbox()
    large = "x" * 20_000  # compressed by the client
    clients.send(message("plain", large))
    clients.consume("plain-group", "plain", inbox)
    inbox.wait(1, "large messages")
    check(inbox.all[0].text == large, "the large message is another one")
    ids = {f"body-{n}": clients.send(message("plain", f"body-{n}", tag="paid", key=f"key-{n}")) for n in range(100)}
    for arrival in inbox.wait(101, "messages")[1:]:
        check(arrival.key == arrival.text.replace("body", "key"), f"the key of {arrival.text} is {arrival.key}")
        check((arrival.tag, arrival.topic) == ("paid", "plain"), f"{arrival.text} has {arrival}")
        check(arrival.unique_key == ids[arrival.text], f"{arrival.text} has the id {arrival.unique_key}")
    check({arrival.queue for arrival in inbox.all} == set(range(4)), "the topic has the four queues that it asks for")
    check(len(inbox.by_text) == 101, "a message came twice")
    ok("100 messages and a large one arrived once each, with body, key, tag and id, over four queues")


def tagged(clients: Clients) -> None:
    inbox = Inbox()
    for tag in "abcd":
        clients.send(message("tagged", f"early {tag}", tag=tag))
    clients.consume("tagged-group", "tagged", inbox, "a || c")
    inbox.wait(2, "early messages of two tags")
    for tag in "abcd":
        clients.send(message("tagged", f"late {tag}", tag=tag))
    tags = sorted(arrival.tag for arrival in inbox.wait(4, "messages of two tags"))
    check(tags == ["a", "a", "c", "c"], f"messages of {tags} arrived")
    ok("a consumer of a || c gets those tags and no others")


def oneway_and_batch(clients: Clients) -> None:
    inbox = Inbox()
    clients.producer.send_oneway(message("several", "nobody waits"))
    clients.consume("several-group", "several", inbox)
    inbox.wait(1, "oneway messages")
    result = clients.producer.send_batch([message("several", f"member {n}") for n in range(3)])
    check(int(result.status) == 0, f"a batch was answered with {result}")
    inbox.wait(4, "oneway messages and members of a batch")
    check(inbox.by_text.keys() == {"nobody waits", "member 0", "member 1", "member 2"}, f"{inbox.all} arrived")
    ok("a oneway message arrived, and the members of a batch one by one")


def in_order(clients: Clients) -> None:
    inbox = Inbox()
    for n in range(60):
        result = clients.producer.send_orderly(message("ordered", f"{n % 3}:{n}"), n % 3)
        check(int(result.status) == 0, f"a send was answered with {result}")
    clients.consume("ordered-group", "ordered", inbox, orderly=True)
    arrivals = inbox.wait(60, "messages in order")
    for part in range(3):
        mine = [arrival for arrival in arrivals if arrival.text.startswith(f"{part}:")]
        check([arrival.text for arrival in mine] == [f"{part}:{n}" for n in range(part, 60, 3)], f"{mine} is no order")
        check({arrival.queue for arrival in mine} == {part}, f"{mine} is of several queues")
    ok("an orderly consumer gets 60 messages, each queue in order")


def pulled(clients: Clients) -> None:
    inbox = Inbox()
    for n in range(5):
        clients.send(message("pulled", f"pulled {n}"))
    clients.pull("pulled-group", "pulled", inbox)
    check(inbox.by_text.keys() == {f"pulled {n}" for n in range(5)}, f"{inbox.all} was pulled")
    ok("a consumer may pull by itself")


run(story)
