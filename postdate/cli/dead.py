"""`postdate dead`: list, show, resend and delete the dead letters of a group."""

import argparse
from typing import Any

from postdate.cli.command import NEGATIVE, OK, Verbs, is_meant, print_json, say_no
from postdate.cli.render import body, body_fields, count, instant, print_facts, print_table
from postdate.cli.values import instant as instant_ms
from postdate.cli.values import positive
from postdate.client import Client, DeadLetter, connect
from postdate.errors import UsageError
from postdate.spans import instant as instant_of
from postdate.spans import instant_ms as ms_of

HELP = """\
Lists, shows, resends and deletes dead letters: messages that a group has tried as often as it may.

examples:
  postdate dead list billing                                 the oldest first, with the reason of the last failure
  postdate dead list billing --topic orders --reason timeout --since 2027-01-01T08:00:00+01:00
  postdate dead show billing 7F0000010BB82A9F8D3C000000000001
  postdate dead resend billing 7F0000010BB82A9F8D3C000000000001
  postdate dead resend billing --reason timeout --yes        to the topics that they came from
  postdate dead delete billing --all --yes

A resend sends the message to its topic again, with the same id, key, tag and properties; every group of the topic
receives it. The letter is done with when the message is stored. A letter that is resent or deleted is listed no more.
It stays in the topic %DLQ%GROUP until the broker's retention removes it.

exit codes: 0 done, 1 there is no such group or letter, or nothing was meant, 2 wrong usage, 3 no broker was reached or
it refused, 130 interrupted
"""

_CANNOT_ASK = {
    "resend": "a resend cannot be taken back: give --yes if you mean it",
    "delete": "a deletion cannot be undone: give --yes if you mean it",
}


def add(parser: argparse.ArgumentParser) -> None:
    verbs = Verbs(parser, "group", HELP)
    listed = verbs.add("list", _list, "the dead letters of a group")
    _add_filters(listed)
    listed.add_argument("--limit", metavar="N", type=positive, default=100, help="at most this many (default: 100)")
    verbs.add("show", _show, "one dead letter, whole").add_argument("id", metavar="ID", help="id of a letter")
    for name, run, summary in (
        ("resend", _resend, "send dead letters to the topics that they came from"),
        ("delete", _delete, "be done with dead letters"),
    ):
        verb = verbs.add(name, run, summary)
        verb.add_argument("id", metavar="ID", nargs="*", help="id of a letter")
        _add_filters(verb)
        verb.add_argument("--all", action="store_true", help="all that the group has")
        verb.add_argument("--yes", action="store_true", help="do not ask")


def _add_filters(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("--topic", metavar="T", help="those that were sent to this topic")
    verb.add_argument("--key", metavar="K", help="those with this key")
    verb.add_argument("--reason", metavar="TEXT", help="those whose reason has this text, in any case")
    verb.add_argument("--since", metavar="TIME", type=instant_ms, help="those that died then or later")
    verb.add_argument("--until", metavar="TIME", type=instant_ms, help="those that died before")


def _filters(arguments: argparse.Namespace) -> dict[str, Any]:
    return {
        "topic": arguments.topic, "key": arguments.key, "reason": arguments.reason,
        "since": None if arguments.since is None else instant_of(arguments.since),
        "until": None if arguments.until is None else instant_of(arguments.until),
    }  # fmt: skip


def _list(arguments: argparse.Namespace) -> int:
    with connect(arguments.addr) as client:
        letters = client.dead_letters(arguments.name, **_filters(arguments), limit=arguments.limit + 1)
    shown = letters[: arguments.limit]
    if arguments.json:
        for letter in shown:
            print_json(_fields(letter))
    elif not shown:
        print(f"group {arguments.name} has no such dead letter" if _is_chosen(arguments) else "no dead letters")
    else:
        rows: list[list[str | int]] = [
            [letter.id, letter.topic or "-", letter.key or "-", instant(ms_of(letter.dead_at)), letter.attempts,
             _first_line(letter.reason)]
            for letter in shown
        ]  # fmt: skip
        print_table(["id", "topic", "key", "dead since", "attempts", "reason"], rows)
        if len(letters) > len(shown):
            print(f"and more: --limit {2 * arguments.limit} shows them")
    return OK


def _is_chosen(arguments: argparse.Namespace) -> bool:
    return any(value is not None for value in _filters(arguments).values())


def _first_line(reason: str) -> str:
    return (reason.splitlines() or ["-"])[0][:80]


def _show(arguments: argparse.Namespace) -> int:
    with connect(arguments.addr) as client:
        letters = _by_ids(client, arguments.name, [arguments.id])
    if isinstance(letters, int):
        return letters
    for letter in letters:
        if arguments.json:
            print_json(_fields(letter))
            continue
        facts = {
            "id": letter.id, "group": letter.group, "topic": letter.topic or "unknown",
            "origin": letter.origin or "unknown", "keys": " ".join(letter.keys) or "none", "tag": letter.tag or "none",
            "dead since": instant(ms_of(letter.dead_at)), "attempts": str(letter.attempts),
            "reason": letter.reason or "nobody said", "body": body(letter.body, whole=True),
        }  # fmt: skip
        print_facts(facts)
    return OK


def _fields(letter: DeadLetter) -> dict[str, Any]:
    return {
        "id": letter.id, "group": letter.group, "topic": letter.topic, "origin": letter.origin, "keys": letter.keys,
        "tag": letter.tag, "dead_at_ms": ms_of(letter.dead_at), "attempts": letter.attempts, "reason": letter.reason,
        "queue_id": letter.queue_id, "queue_offset": letter.queue_offset, "properties": letter.properties,
        **body_fields(letter.body),
    }  # fmt: skip


def _resend(arguments: argparse.Namespace) -> int:
    return _act(arguments, "resend", "resent")


def _delete(arguments: argparse.Namespace) -> int:
    return _act(arguments, "delete", "deleted")


def _act(arguments: argparse.Namespace, verb: str, done: str) -> int:
    if (bool(arguments.id) + _is_chosen(arguments) + arguments.all) != 1:
        raise UsageError("say which letters: their ids, or conditions such as --topic, or --all")
    with connect(arguments.addr) as client:
        if arguments.id:
            letters = _by_ids(client, arguments.name, arguments.id)
            if isinstance(letters, int):
                return letters
        else:
            letters = client.dead_letters(arguments.name, **_filters(arguments), limit=None)
        if not letters:
            return say_no(f"group {arguments.name} has no such dead letter")
        question = f"{verb.capitalize()} {count(len(letters), 'dead letter')} of group {arguments.name}?"
        if not (arguments.yes or is_meant(question, _CANNOT_ASK[verb])):
            return say_no(f"nothing was {done}")
        number = len(client.resend_dead_letters(letters)) if verb == "resend" else client.delete_dead_letters(letters)
    if arguments.json:
        print_json({"group": arguments.name, done: number})
    else:
        print(f"{done} {count(number, 'dead letter')} of group {arguments.name}")
    return OK


def _by_ids(client: Client, group: str, ids: list[str]) -> list[DeadLetter] | int:
    """The letters of these ids; or the exit code, if one of them is not there."""
    letters = [letter for letter in client.dead_letters(group, limit=None) if letter.id in ids]
    missing = sorted(set(ids) - {letter.id for letter in letters})
    if missing:
        say_no(f"group {group} has no dead letter {missing[0]}")
        return NEGATIVE
    return letters
