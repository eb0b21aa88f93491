"""`postdate topic`: list, show, create, update and delete topics."""

import argparse

from postdate.cli.command import OK, Verbs, is_meant, print_json, say_no
from postdate.cli.render import count, print_facts, print_table
from postdate.cli.values import positive
from postdate.client import admin
from postdate.errors import UsageError

HELP = """\
Lists, shows, creates, updates and deletes topics.

examples:
  postdate topic list
  postdate topic show orders                      its queues, their offsets, its waiting messages
  postdate topic create orders --queues 4
  postdate topic update orders --perm r           no more sends; waiting messages still come
  postdate topic delete orders --yes              also cancels its waiting messages

exit codes: 0 done, 1 there is no such topic, or there is one already, 2 wrong usage, 3 no broker was reached or it
refused, 130 interrupted
"""

_PERMS = {"rw": 6, "r": 4, "w": 2}
_PERM_NAMES = {6: "read and write", 4: "read only", 2: "write only", 0: "neither read nor write"}
_QUEUES_DEFAULT = 8


def add(parser: argparse.ArgumentParser) -> None:
    verbs = Verbs(parser, "topic", HELP)
    verbs.add("list", _list, "all topics, and how many messages wait for each", named=False)
    verbs.add("show", _show, "the queues of a topic, their offsets, and what waits")
    _add_wanted(verbs.add("create", _create, "make a topic"))
    _add_wanted(verbs.add("update", _update, "change a topic"))
    verbs.add_delete(_delete, "forget a topic and cancel what waits for it")


def _add_wanted(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("--queues", metavar="N", type=positive, help=f"how many queues (a new one: {_QUEUES_DEFAULT})")
    verb.add_argument("--perm", choices=tuple(_PERMS), help="may it be read, written? (a new one: rw)")


def _list(arguments: argparse.Namespace) -> int:
    names = admin.topic_names(arguments.addr)
    waiting = {each["topic"]: each["near"] + each["far"] for each in admin.pending(arguments.addr)["topics"]}
    rows: list[list[str | int]] = [[name, waiting.get(name, 0)] for name in names]
    if arguments.json:
        print_json([{"topic": name, "waiting": number} for name, number in rows])
    elif rows:
        print_table(["topic", "waiting"], rows)
    else:
        print("there is no topic yet; the first send to one makes it")
    return OK


def _show(arguments: argparse.Namespace) -> int:
    found = admin.topic(arguments.addr, arguments.name)
    ranges = admin.queue_ranges(arguments.addr, found.name)
    waits = admin.pending(arguments.addr, found.name)
    if arguments.json:
        queues = [each._asdict() for each in ranges]
        print_json({**found._asdict(), "near": waits["near"], "far": waits["far"], "queues": queues})
        return OK
    queue_count = str(found.read_queue_count)
    if found.read_queue_count != found.write_queue_count:
        queue_count = f"{found.read_queue_count} to read, {found.write_queue_count} to write"
    print_facts({
        "topic": found.name,
        "queues": queue_count,
        "perm": _PERM_NAMES.get(found.perm & 6, str(found.perm)),
        "waiting": f"{waits['near'] + waits['far']:,} ({waits['near']:,} near, {waits['far']:,} far)",
    })  # fmt: skip
    rows = [[*each, each.max_offset - each.min_offset] for each in ranges]
    print()
    print_table(["queue", "min", "max", "messages"], rows)
    return OK


def _create(arguments: argparse.Namespace) -> int:
    queue_count = arguments.queues or _QUEUES_DEFAULT
    wanted = admin.Topic(arguments.name, queue_count, queue_count, _PERMS[arguments.perm or "rw"])
    if wanted.name in admin.topic_names(arguments.addr):
        return say_no(f"there is a topic {wanted.name} already: change it with topic update")
    admin.put_topic(arguments.addr, wanted)
    _print_put(wanted, "created", json=arguments.json)
    return OK


def _update(arguments: argparse.Namespace) -> int:
    if arguments.queues is None and arguments.perm is None:
        raise UsageError("nothing to change: give --queues or --perm")
    found = admin.topic(arguments.addr, arguments.name)
    wanted = admin.Topic(
        found.name,
        arguments.queues or found.read_queue_count,
        arguments.queues or found.write_queue_count,
        _PERMS[arguments.perm] if arguments.perm else found.perm,
    )
    admin.put_topic(arguments.addr, wanted)
    _print_put(wanted, "updated", json=arguments.json)
    return OK


def _print_put(topic: admin.Topic, verb: str, *, json: bool) -> None:
    if json:
        print_json(topic._asdict())
    else:
        queues = count(topic.read_queue_count, "queue")
        print(f"{verb} topic {topic.name}: {queues}, {_PERM_NAMES.get(topic.perm & 6, str(topic.perm))}")


def _delete(arguments: argparse.Namespace) -> int:
    if not (arguments.yes or is_meant(f"Delete topic {arguments.name} and cancel what waits for it?")):
        return say_no("nothing was deleted")
    cancelled = admin.delete_topic(arguments.addr, arguments.name)
    if arguments.json:
        print_json({"topic": arguments.name, "cancelled": cancelled})
    else:
        print(f"deleted topic {arguments.name}; {count(cancelled, 'waiting message')} cancelled")
    return OK
