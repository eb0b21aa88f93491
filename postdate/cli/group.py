"""`postdate group`: list, show, create, change and delete consumer groups."""

import argparse

from postdate.cli.command import OK, Verbs, is_meant, print_json, say_no
from postdate.cli.render import count, print_facts, print_table, rough
from postdate.cli.values import positive, span
from postdate.client import admin
from postdate.errors import UsageError

HELP = """\
Lists, shows, creates, changes and deletes consumer groups.

examples:
  postdate group list
  postdate group show billing                     its members, and how far it has read each queue
  postdate group create billing                   for brokers that create no groups by themselves
  postdate group update billing --retry 10s,1m,10m --attempts 5
                                                  a message that fails comes again after 10 s, 1 min, 10 min and
                                                  10 min; then it is a dead letter
  postdate group delete billing --yes             also deletes its offsets

--retry gives the delays before the second attempt, the third, and so on; the last one holds for all later attempts.
"default" stands for the broker's, its delay levels from the third on. --attempts counts the first one, too. What a
consumer asks for itself comes before both.

exit codes: 0 done, 1 there is no such group, or there is one already, 2 wrong usage, 3 no broker was reached or it
refused, 130 interrupted
"""


def add(parser: argparse.ArgumentParser) -> None:
    verbs = Verbs(parser, "group", HELP)
    verbs.add("list", _list, "all groups", named=False)
    verbs.add("show", _show, "the members of a group, and how far it has read each queue")
    _add_settings(verbs.add("create", _create, "make a group"))
    _add_settings(verbs.add("update", _update, "change how a group tries messages again"))
    verbs.add_delete(_delete, "forget a group and its offsets")


def _add_settings(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--retry", metavar="SPANS", type=_delays, help='delays between attempts, such as 10s,1m,10m, or "default"'
    )
    parser.add_argument(
        "--attempts", metavar="N", type=positive, help="how often a message is tried before it is a dead letter"
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
            "retry_delays_ms": delays_ms, "attempts": attempts,
        })  # fmt: skip
    else:
        print_facts([
            ("group", arguments.name),
            ("members", ", ".join(members) or "none at this moment"),
            ("lag", f"{sum(each.lag for each in progress):,}"),
            ("leased", f"{sum(each.leased for each in progress):,}"),
            ("retry", f"{count(attempts, 'attempt')}, {_tell_delays(delays_ms)}"),
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
    if arguments.retry is None and arguments.attempts is None:
        raise UsageError("nothing is to be changed: give --retry or --attempts")
    admin.put_group(arguments.addr, arguments.name, _settings(arguments))
    _print_done(arguments, "updated")
    return OK


def _settings(arguments: argparse.Namespace) -> dict[str, object]:
    """The settings that the flags name."""
    settings: dict[str, object] = {}
    if arguments.retry is not None:
        settings["retryDelaysMs"] = arguments.retry or None
    if arguments.attempts is not None:
        settings["retryMaxTimes"] = arguments.attempts - 1
    return settings


def _delete(arguments: argparse.Namespace) -> int:
    if not (arguments.yes or is_meant(f"Delete group {arguments.name} and forget its offsets?")):
        return say_no("nothing was deleted")
    admin.delete_group(arguments.addr, arguments.name)
    _print_done(arguments, "deleted")
    return OK


def _print_done(arguments: argparse.Namespace, verb: str) -> None:
    if arguments.json:
        print_json({"group": arguments.name, verb: True})
    else:
        print(f"{verb} group {arguments.name}")
