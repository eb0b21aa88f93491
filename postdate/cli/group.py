"""`postdate group`: list, show, create, change, reset and delete consumer groups."""

import argparse
import sys

from postdate.cli.command import OK, Verbs, is_meant, print_json, say_no
from postdate.cli.render import count, print_facts, print_table, rough
from postdate.cli.values import instant, positive, span
from postdate.client import QueueReset, admin, connect
from postdate.client.resets import ResetTo
from postdate.errors import UsageError

HELP = """\
Lists, shows, creates, changes, resets and deletes consumer groups.

examples:
  postdate group list
  postdate group show billing                     its members, and how far it has read each queue
  postdate group create billing                   for brokers that create no groups by themselves
  postdate group update billing --retry 10s,1m,10m --attempts 5
                                                  a message that fails comes again after 10 s, 1 min, 10 min and
                                                  10 min; then it is a dead letter
  postdate group create ledger --in-order yes     RocketMQ 5's clients get the messages of a queue in order
  postdate group reset billing --to earliest --dry-run                  what it would receive again, queue by queue
  postdate group reset billing --to 2027-01-01T08:00:00+01:00 --topic orders
  postdate group reset billing --to latest --yes                        skips all that it has not received
  postdate group delete billing --yes             also deletes its offsets

--retry gives the delays before the second attempt, the third, and so on; the last one holds for all later attempts.
"default" stands for the broker's, its delay levels from the third on. --attempts counts the first one, too. What a
consumer asks for itself comes before both.

A reset moves a group to the first message that became visible at or after a time, in one topic or in all that it has
read. Connected members go on from there at once. Messages that the group has in work or that wait for another try
stay with it: a reset neither skips them nor gives them twice.

exit codes: 0 done, 1 there is no such group or topic, or there is one already, or nothing was meant, 2 wrong usage,
3 no broker was reached or it refused, 130 interrupted
"""


_IN_ORDER = "consumeMessageOrderly"  # RocketMQ's name
_CANNOT_ASK = "a reset may skip messages: give --yes if you mean it, or --dry-run"


def add(parser: argparse.ArgumentParser) -> None:
    verbs = Verbs(parser, "group", HELP)
    verbs.add("list", _list, "all groups", named=False)
    verbs.add("show", _show, "the members of a group, and how far it has read each queue")
    _add_settings(verbs.add("create", _create, "make a group"))
    _add_settings(verbs.add("update", _update, "change how a group tries messages again"))
    reset = verbs.add("reset", _reset, "move a group to another place in its topics")
    reset.add_argument(
        "--to", metavar="TIME", type=_place, required=True, help="earliest, latest, ISO 8601 or epoch ms"
    )
    reset.add_argument("--topic", metavar="T", help="in this topic alone (default: all that it has read)")
    reset.add_argument("--dry-run", action="store_true", help="move nothing: print what would happen")
    reset.add_argument("--yes", action="store_true", help="do not ask")
    verbs.add_delete(_delete, "forget a group and its offsets")


def _add_settings(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--retry", metavar="SPANS", type=_delays, help='delays between attempts, such as 10s,1m,10m, or "default"'
    )
    parser.add_argument(
        "--attempts", metavar="N", type=positive, help="how often a message is tried before it is a dead letter"
    )
    parser.add_argument(
        "--in-order", choices=("yes", "no"), help="does it get the messages of a queue in order? (RocketMQ 5's clients)"
    )


def _delays(text: str) -> list[int]:
    """The milliseconds of spans with commas between them; none for the broker's own."""
    return [] if text == "default" else [span(part.strip()) for part in text.split(",")]


def _list(arguments: argparse.Namespace) -> int:
    names = admin.group_names(arguments.addr)
    if arguments.json:
        print_json([{"group": name} for name in names])
    else:
        print(*(names or ["there is no group yet; the first consumer of one makes it"]), sep="\n")
    return OK


def _show(arguments: argparse.Namespace) -> int:
    members = admin.members(arguments.addr, arguments.name)
    progress = admin.progress(arguments.addr, arguments.name)
    warnings = admin.group_warnings(arguments.addr, arguments.name)
    settings = admin.group_settings(arguments.addr, arguments.name) or {}
    delays_ms, attempts = settings.get("retryDelaysMs"), settings.get("retryMaxTimes", 0) + 1
    if arguments.json:
        queues = [{**each._asdict(), "lag": each.lag} for each in progress]
        print_json({
            "group": arguments.name, "members": members, "queues": queues, "warnings": warnings,
            "retry_delays_ms": delays_ms, "attempts": attempts, "in_order": settings.get(_IN_ORDER) is True,
        })  # fmt: skip
    else:
        print_facts([
            ("group", arguments.name),
            ("members", ", ".join(members) or "none at this moment"),
            ("lag", f"{sum(each.lag for each in progress):,}"),
            ("leased", f"{sum(each.leased for each in progress):,}"),
            ("retry", f"{count(attempts, 'attempt')}, {_tell_delays(delays_ms)}"),
            *([("order", "the messages of a queue come in order")] if settings.get(_IN_ORDER) is True else []),
            *(("warning", warning) for warning in warnings),
        ])  # fmt: skip
        rows: list[list[str | int]] = [[*each, each.lag] for each in progress]
        if rows:
            print()
            print_table(["topic", "queue", "committed", "max", "leased", "lag"], rows)
    return OK


def _tell_delays(delays_ms: list[int] | None) -> str:
    return f"after {', '.join(map(rough, delays_ms))}" if delays_ms else "after the delays of the broker"


def _create(arguments: argparse.Namespace) -> int:
    if arguments.name in admin.group_names(arguments.addr):
        return say_no(f"there is a group {arguments.name} already")
    admin.put_group(arguments.addr, arguments.name, _settings(arguments))
    _print_done(arguments, "created")
    return OK


def _update(arguments: argparse.Namespace) -> int:
    if admin.group_settings(arguments.addr, arguments.name) is None:
        return say_no(f"there is no group {arguments.name}")
    settings = _settings(arguments)
    if not settings:
        raise UsageError("nothing is to be changed: give --retry, --attempts or --in-order")
    admin.put_group(arguments.addr, arguments.name, settings)
    _print_done(arguments, "updated")
    return OK


def _settings(arguments: argparse.Namespace) -> dict[str, object]:
    """The settings that the flags name."""
    settings: dict[str, object] = {}
    if arguments.retry is not None:
        settings["retryDelaysMs"] = arguments.retry or None
    if arguments.attempts is not None:
        settings["retryMaxTimes"] = arguments.attempts - 1
    if arguments.in_order is not None:
        settings[_IN_ORDER] = arguments.in_order == "yes"
    return settings


def _delete(arguments: argparse.Namespace) -> int:
    if not (arguments.yes or is_meant(f"Delete group {arguments.name} and forget its offsets?")):
        return say_no("nothing was deleted")
    admin.delete_group(arguments.addr, arguments.name)
    _print_done(arguments, "deleted")
    return OK


def _place(text: str) -> ResetTo:
    return text if text in ("earliest", "latest") else instant(text)  # type: ignore[return-value]


def _reset(arguments: argparse.Namespace) -> int:
    if not (arguments.yes or arguments.dry_run or sys.stdin.isatty()):
        raise UsageError(_CANNOT_ASK)
    with connect(arguments.addr) as client:
        plan = client.reset_group(arguments.name, arguments.to, topic=arguments.topic, dry_run=True)
        if not arguments.json:
            _print_resets(plan)
        if not arguments.dry_run:
            if not (arguments.yes or is_meant(f"Move group {arguments.name}?", _CANNOT_ASK)):
                return say_no("nothing was moved")
            plan = client.reset_group(arguments.name, arguments.to, topic=arguments.topic)
    if arguments.json:
        queues = [{**each._asdict(), "again": each.again, "skipped": each.skipped} for each in plan]
        print_json({"group": arguments.name, "moved": not arguments.dry_run, "queues": queues})
    else:
        print("nothing was moved" if arguments.dry_run else f"moved group {arguments.name}")
    return OK


def _print_resets(plan: list[QueueReset]) -> None:
    rows: list[list[str | int]] = [
        [each.topic, each.queue_id, "-" if each.before is None else each.before, each.after, each.again, each.skipped,
         each.in_work]
        for each in plan
    ]  # fmt: skip
    print_table(["topic", "queue", "from", "to", "again", "skipped", "in work"], rows)
    again, skipped = sum(each.again for each in plan), sum(each.skipped for each in plan)
    in_work = sum(each.in_work for each in plan)
    print(f"{count(again, 'message')} to be delivered again, {count(skipped, 'message')} to be skipped")
    if in_work:
        print(f"{count(in_work, 'message')} in work or waiting for another try stay with the group")


def _print_done(arguments: argparse.Namespace, verb: str) -> None:
    if arguments.json:
        print_json({"group": arguments.name, verb: True})
    else:
        print(f"{verb} group {arguments.name}")
