"""`postdate group`: list, show, create and delete consumer groups."""

import argparse

from postdate.cli.command import OK, Verbs, is_meant, print_json, say_no
from postdate.cli.render import print_facts, print_table
from postdate.client import admin

HELP = """\
Lists, shows, creates and deletes consumer groups.

examples:
  postdate group list
  postdate group show billing                     its members, and how far it has read each queue
  postdate group create billing                   for brokers that create no groups by themselves
  postdate group delete billing --yes             also deletes its offsets

exit codes: 0 done, 1 there is no such group, or there is one already, 2 wrong usage, 3 no broker was reached or it
refused, 130 interrupted
"""


def add(parser: argparse.ArgumentParser) -> None:
    verbs = Verbs(parser, "group", HELP)
    verbs.add("list", _list, "all groups", named=False)
    verbs.add("show", _show, "the members of a group, and how far it has read each queue")
    verbs.add("create", _create, "make a group")
    verbs.add_delete(_delete, "forget a group and its offsets")


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
    if arguments.json:
        queues = [{**each._asdict(), "lag": each.lag} for each in progress]
        print_json({"group": arguments.name, "members": members, "queues": queues, "warnings": warnings})
    else:
        print_facts([
            ("group", arguments.name),
            ("members", ", ".join(members) or "none at this moment"),
            ("lag", f"{sum(each.lag for each in progress):,}"),
            *(("warning", warning) for warning in warnings),
        ])  # fmt: skip
        rows: list[list[str | int]] = [[*each, each.lag] for each in progress]
        if rows:
            print()
            print_table(["topic", "queue", "committed", "max", "lag"], rows)
    return OK


def _create(arguments: argparse.Namespace) -> int:
    if arguments.name in admin.group_names(arguments.addr):
        return say_no(f"there is a group {arguments.name} already")
    admin.put_group(arguments.addr, arguments.name)
    _print_done(arguments, "created")
    return OK


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
